"""Help, version and completion without the commands themselves: from data that `tools/render-docs`
writes, so that neither NATS nor a parser is imported.
"""
