"""From records to tokens: templates of texts, completions and conversations, and the tokenizers themselves."""
