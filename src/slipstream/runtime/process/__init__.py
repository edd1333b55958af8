"""A process and its surroundings: environment, scheduler, errors, events, secrets."""
