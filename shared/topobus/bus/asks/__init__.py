"""Requests and answers on the bus: deadlines, fairness among askers, and the answering side."""
