"""What tests share: tiny models and tokenizers, ranks that really run, run files."""
