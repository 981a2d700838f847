"""What a classic DRA driver of a third party implements, and how it is found."""
