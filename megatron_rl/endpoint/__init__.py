"""An OpenAI-compatible endpoint on the rollout engine."""
