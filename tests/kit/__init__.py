"""What several tests use: models, data, runs, servers and ranks for tests."""
