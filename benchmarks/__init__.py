"""Benchmarks. With this file, a library that installs a package `benchmarks` of its own does not hide this one."""
