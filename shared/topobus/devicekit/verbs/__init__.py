"""The verbs that change a device: prepare, attach, adjust, clean, reset; each with the journal around it."""
