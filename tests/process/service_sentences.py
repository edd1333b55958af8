"""Sentences of three topics that a text classifier can learn."""

from __future__ import annotations

TOPICS = {
    "weather": ["rain", "snow", "sun", "wind", "storm"],
    "food": ["bread", "soup", "cheese", "apple", "rice"],
    "travel": ["train", "plane", "ticket", "hotel", "bus"],
}
FORMS = ["is there {}", "I want {} now", "tell me about {}", "no {} please", "why {}", "{} again"]


def sentences(topics: int, forms: int = len(FORMS)) -> list[str]:
    """Rows of training data, of the first topics and forms."""
    return [
        f"{form.format(word)},{topic}"
        for topic, words in [*TOPICS.items()][:topics]
        for word in words
        for form in FORMS[:forms]
    ]
