"""Server processes: what they are told, what they hold, what they answer."""
