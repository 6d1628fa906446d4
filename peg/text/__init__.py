"""Text: tokenizer, incremental detokenizer, chat template, stop strings."""
