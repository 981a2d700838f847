"""One file a job: each compares what is with what should be and writes the next step."""
