"""Everything that crosses NATS: the messages, their bounds, and the catalogue of subjects, streams
and buckets.
"""
