"""State, events and asks over one supervised connection to NATS. No other room talks to NATS."""
