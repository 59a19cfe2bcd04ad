"""Converts records to tokens: templates for texts, completions and conversations, and tokenizers."""
