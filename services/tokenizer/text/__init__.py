"""Between text and tokens, with no knowledge of requests: loading, encoding, detokenizing, stop strings."""
