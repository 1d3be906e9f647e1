"""Words for the gaps in sentences of `launch.training.tasks`, by the name of the gap."""

from collections.abc import Mapping, Sequence
from typing import Final

WORDS: Final[Mapping[str, Sequence[str]]] = {
    "topic": (
        *("volcanoes", "bees", "coffee", "the moon", "railways", "glaciers", "chess", "bread"),
        *("vaccination", "the Roman Empire", "jazz", "earthquakes", "solar power", "whales"),
        *("money", "sleep", "photosynthesis", "bridges", "the printing press", "tea", "deserts"),
        *("memory", "inflation", "black holes", "forests", "wolves", "cameras", "the human heart"),
        *("electric cars", "marathon running", "the Olympic Games", "tourism", "recycling"),
        *("the stock market", "dinosaurs", "the Silk Road", "cheese", "satellites", "opera"),
        *("the internet", "gardening", "rivers", "penguins", "the Cold War", "antibiotics"),
        *("clouds", "architecture", "a city's buses", "farming", "steel", "public libraries"),
        *("swimming", "elections", "the French Revolution", "genetics", "hurricanes", "owls"),
        *("robots", "school lunches", "the violin", "vitamins", "lighthouses", "rice", "fashion"),
        *("unemployment", "coral reefs", "the periodic table", "football", "castles", "sugar"),
        *("video games", "a flood in a small town", "a bank robbery", "a new museum", "salt"),
        *("a film festival", "a strike of nurses", "a lost dog", "a court case", "space travel"),
        *("trade between two countries", "a scientific discovery", "an election campaign"),
        *("a football transfer", "a royal wedding", "a fire in a factory", "air traffic"),
    ),
    "thing": (
        *("a bicycle", "a bank account", "a computer virus", "a rainbow", "a battery", "a vote"),
        *("a contract", "a lens", "a magnet", "a poem", "a loan", "a recipe", "an atom", "a map"),
        *("a refrigerator", "a mortgage", "an engine", "a website", "a calendar", "a tax"),
        *("a cell", "a telescope", "an algorithm", "a fraction", "a symphony", "a vaccine"),
        *("a glacier", "a database", "a compass", "a transistor", "a theatre", "a harbour"),
    ),
    "person": (
        *("a teacher", "a nurse", "a farmer", "a young programmer", "a retired sailor", "a baker"),
        *("a child of ten", "a beginner", "my manager", "a customer", "my grandmother"),
        *("a lawyer", "an engineer", "a student", "a journalist", "a tourist", "a musician"),
    ),
    "name": (
        *("Anna", "Omar", "Lucy", "Ravi", "Tom", "Mei", "Carlos", "Ingrid", "Kofi", "Sara"),
        *("Ben", "Yuki", "Elena", "Noah", "Fatima", "Jack", "Priya", "Oscar", "Nina", "Samuel"),
    ),
    "item": (
        *("apples", "pencils", "marbles", "stamps", "books", "eggs", "cookies", "tickets"),
        *("chairs", "bottles", "shirts", "plants", "coins", "cards", "oranges", "bricks"),
    ),
    "place": (
        *("a shop", "a school", "a farm", "a library", "a bakery", "a market", "a garage"),
        *("a hotel", "an office", "a zoo", "a warehouse", "a hospital"),
    ),
    "city": (
        *("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Chicago", "Nairobi", "Mumbai", "Sydney"),
        *("Berlin", "Toronto", "Istanbul", "Lisbon", "Seoul", "Naples", "Boston"),
    ),
    "tone": (
        *("friendly", "formal", "funny", "short", "sad", "persuasive", "polite", "dramatic"),
        *("cheerful", "simple", "angry", "poetic", "calm", "excited"),
    ),
    "form": (
        *("story", "poem", "letter", "speech", "dialogue", "blog post", "review", "diary entry"),
        *("song", "news report", "advertisement", "fairy tale", "essay", "email"),
    ),
    "language": ("Python", "JavaScript", "C", "Java", "SQL", "Bash"),
    "program": (
        *("reverses a string", "sorts a list of numbers", "counts the words in a text"),
        *("checks whether a number is prime", "finds the largest value in a list"),
        *("reads a CSV file", "computes a factorial", "removes duplicates from a list"),
        *("merges two sorted lists", "converts Celsius to Fahrenheit", "parses a date"),
        *("computes an average", "implements a stack", "finds a substring", "rolls two dice"),
        *("computes Fibonacci numbers", "checks whether brackets are balanced"),
        *("downloads a web page", "counts how often each letter occurs", "searches a binary tree"),
    ),
}
