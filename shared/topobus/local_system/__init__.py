"""The eight services as processes of this machine: started, watched, stopped."""
