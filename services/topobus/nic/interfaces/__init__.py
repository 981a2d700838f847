"""Network interfaces of pods: their configuration, and the driver verbs that apply it."""
