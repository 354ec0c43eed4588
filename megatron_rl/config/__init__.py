"""Flags to a frozen ``RLConfig``: parse, resolve, validate. No torch here.

    config, problems = read_config(sys.argv[1:], world_size)

does all three and finds every problem at once. A section's file declares its flags, how their
defaults follow from others, and the rules over them.
"""
