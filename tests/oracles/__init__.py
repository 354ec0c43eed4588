"""What the product computes, computed again by transformers and plain torch; see docs/measurements/oracles.md."""
