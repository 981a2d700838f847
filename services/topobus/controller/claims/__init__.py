"""The life of a claim and of its pods as values: what an object says, and what is written into it next. Pure."""
