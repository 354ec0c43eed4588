"""What the product computes, computed again by transformers and plain torch; see docs/oracles.md."""
