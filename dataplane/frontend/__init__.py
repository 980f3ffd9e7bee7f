"""What turns requests into token ids and token ids into text: chat template, tokenizer, detokenizer, stop strings."""
