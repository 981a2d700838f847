"""The commands of `topobus`, one module a topic; each is loaded only when it runs."""
