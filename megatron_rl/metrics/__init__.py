"""What a run leaves behind: metric writers, timers, rollout records, the run directory and its report.

It never brings torch when it is imported. Import from the modules themselves; this file re-exports nothing, so that
``python -m megatron_rl.metrics.report`` does not load the report twice.
"""
