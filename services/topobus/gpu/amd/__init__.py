"""AMD's cards: their partitions and modes."""
