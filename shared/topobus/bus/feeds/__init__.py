"""Delivery in order, without gap or duplicate: of a stream, a bucket, a key."""
