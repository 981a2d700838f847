"""Network interfaces of pods: what they shall be, and the driver verbs that make them so."""
