"""Rules that no single flag can break. Each yields one line a problem: what, why, what instead.

A rule sees a resolved configuration. It says nothing where a value it needs is absent: that is reported once,
by ``required``.
"""
