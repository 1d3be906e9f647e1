"""The kinds of talks that the target has with itself, where no prompts are given.

One entry a kind: its name, its weight, its moves. What a draft never saw it proposes badly, so the
kinds differ in what is asked, in language, and above all in how long the context is from which an
answer starts. Texts that others are asked about are answers themselves, and are kept as well.
"""

from typing import Final

from launch.training.moves import SHORT_ANSWER, Afresh, Answer, Read, Say, Task, Write

_QUESTION_WORDS: Final = (
    *("Who", "What is", "When did", "Where", "How many", "Why do", "Which", "What was the"),
    *("Who was the", "How long", "In which year", "What does", "Where is the", "Who wrote"),
    *("How does", "What are the", "when was", "who is", "what is the name of", "how much"),
)
# Languages that targets are commonly asked about, and words that their sentences begin with.
_STARTS: Final = {
    "German": ("Die", "Der", "Das", "Wir haben", "Es gibt", "Im Jahr", "Nach", "Ein", "Ich", "In"),
    "French": ("Le", "La", "Les", "Nous", "Il y a", "Dans", "Une", "C'est", "Je", "Pour"),
    "Spanish": ("El", "La", "Los", "En", "Una", "Hay", "Según", "Mi", "Cuando", "Es"),
    "Italian": ("Il", "La", "Gli", "Nel", "Una", "Questo", "Quando", "Mio", "Per", "Sono"),
    "Dutch": ("De", "Het", "Een", "Wij", "In", "Er is", "Volgens", "Mijn", "Als", "Ik"),
    "Portuguese": ("O", "A", "Os", "Em", "Uma", "Há", "Quando", "Nós", "Para", "Meu"),
}
_ORDERS: Final = (
    "Translate {0} to English: ",
    "Translate the following {0} sentence into English:\n",
    "Please give the English translation of this {0} text: ",
    "Translate from {0} into English.\n\n",
)
_INTO_ENGLISH: Final = tuple(
    order.format(language) + start
    for language, starts in _STARTS.items()
    for order in _ORDERS
    for start in starts
)
_ENGLISH_STARTS: Final = ("The", "A", "In", "We", "My", "There are", "After", "When", "This", "It")
_FROM_ENGLISH: Final = tuple(
    f"Translate {wording} {language}: {start}"
    for language in _STARTS
    for wording in ("English to", "this sentence into", "the following into")
    for start in _ENGLISH_STARTS
)
_REPORTS: Final = (
    "Write a detailed news article about {topic} in {city}.",
    "Write a long report about {topic} for a newspaper in {city}, with names, numbers and quotes.",
    "Write several paragraphs about {topic} and {topic#b}.",
    "Write a {tone} article about {topic}, for {person}.",
    "Explain everything that {person} should know about {topic}, in several paragraphs.",
    "Write a news story about {topic} with statements of {name} and {name#b}.",
    "Write a press release from {city} about {topic}.",
    "Tell what {name} did about {topic}, in several long paragraphs.",
)
_PASSAGES: Final = (
    "Write one paragraph of an encyclopedia about {topic} and {topic#b}.",
    "Write a paragraph about the history of {topic} in {city}.",
    "Write a factual paragraph about {topic} for {person}.",
    "Describe {topic} in one long paragraph, with {n:2-9} facts.",
    "Write a {tone} paragraph about {thing} and {topic}.",
    "Who is {name} of {city}, known for {topic}? Write one paragraph about {name}.",
)
_FOLLOW_UPS: Final = (
    "Can you explain that in simpler words?",
    "Rewrite your answer as a {form}.",
    "Give me three examples.",
    "Now say the same in a {tone} tone.",
    "Why is that so?",
    "Summarise what you said in two sentences.",
    "What would {person} say about it?",
    "Make it shorter.",
    "Please go on.",
    "How could that be improved?",
    "Turn it into a list of points.",
    "What are the disadvantages?",
    "Translate your answer into French.",
    "Is there another way to do it?",
)
_SUMS: Final = (
    "What is {n:11-999#a} + {n:11-999#b}?",
    "What is {n:200-999#a} - {n:11-199#b}?",
    "Calculate {n:3-99#a} times {n:3-99#b} and show your steps.",
    "What is {n:2-60} percent of {n:40-900#b}?",
    "Solve for x: {n:2-12#a}x + {n:1-40#b} = {n:41-160#c}",
    "A rectangle is {n:2-40#a} cm by {n:2-40#b} cm. What are its area and its perimeter?",
    "{name} has {n:30-90#a} {item} and gives {n:1-5#b} to each of {n:2-6#c} friends. What is left?",
    "A ticket costs ${n:3-40#a}. {name} pays {n:2-9#b} tickets with a $500 bill. What is returned?",
    "{name} walks {n:2-9#a} km a day, on Sundays {n:10-20#b} km. How far is it in {n:2-9#c} weeks?",
    "A shop sells {n:10-90#a} {item} on Monday and twice as many on Tuesday. How many in all?",
    "A tank holds {n:200-900#a} litres and loses {n:2-9#b} an hour. What is left after {n:3-20}?",
    "{name} earns ${n:9-45#a} an hour for {n:4-9#b} hours a day. What is that in {n:5-30} days?",
    "{n:2-9#a} boxes hold {n:6-48#b} {item} each. {name} takes out {n:1-11#c}. How many remain?",
    "{n:2-6#a} people need {n:100-800#b} grams of flour. How much do {n:7-20#c} people need?",
)
_PROBLEMS: Final = (
    "{name} has {n:3-90} {item}.",
    "{name} and {name#b} share {n:10-90} {item}.",
    "There are {n:12-300} {item} in {place}.",
    "A train leaves {city} at {n:5-11} am.",
    "{name} buys {n:2-20} {item} for ${n:1-9#b} each.",
    "{name} is {n:5-40} years old.",
    "{place} is open {n:4-12} hours a day.",
    "A class has {n:12-35} students.",
    "Every week {name} saves ${n:2-60}.",
    "{name} reads {n:8-60} pages",
)
_WRITINGS: Final = (
    "Write a {tone} {form} about {topic}.",
    "Write a {form} for {person} about {topic} and {topic#b}.",
    "Compose a {tone} {form} in which {name} visits {city}.",
    "Write the beginning of a {form} about {thing}.",
    "Describe {city} to {person} in a {tone} way.",
)
_EXPLAINING: Final = (
    "Explain to {person} how {thing} works.",
    "What is the difference between {thing} and {thing#b}?",
    "What are the {n:3-9} main facts about {topic}?",
    "Why do people care about {topic}, and why about {topic#b}?",
    "Describe step by step what {person} does with {thing}.",
    "How would you compare {topic} with {topic#b}?",
    "What should {person} know about {topic}?",
    "How are {topic} and {thing} related?",
)
_REWRITING: Final = (
    "Rewrite this text in a {tone} tone:\n\n{answer}",
    "Correct the mistakes in this text:\n\n{answer}",
    "Rewrite the following paragraph for {person}.\n\n{answer}",
    "Make the following text shorter:\n\n{answer}",
    "{answer}\n\nRephrase the text above.",
)
_LISTS: Final = (
    "List {n:3-12} facts about {topic}.",
    "Give me {n:3-10} tips for {person} who wants to learn about {topic}.",
    "Name {n:4-15} words that have to do with {topic}.",
    "What are the pros and cons of {topic}?",
    "Make a plan of {n:3-7} days for {person} in {city}.",
    "Write {n:3-8} questions about {topic} with their answers.",
)
_EXTRACTING: Final = (
    "List all names, numbers and places in this text:\n\n{answer}",
    "Classify the text by its topic and tone, and give reasons.\n\n{answer}",
    "Make a table of the most important facts of this text.\n\n{answer}",
    "Give this text a title and five keywords:\n\n{answer}",
)
_CODING: Final = (
    "Write a function in {language} that {program}.",
    "Write a program in {language} that {program} and {program#b}.",
    "Show me an example of a program in {language} that {program}, and explain it.",
    "What is wrong with most programs in {language} that try to do this: a program {program}?",
)
_SUMMARISING: Final = (
    "Summarize: {answer}",
    "Summarise the following article in a few sentences:\n\n{answer}",
    "{answer}\n\nWhat is this text about? Answer briefly.",
    "Write a summary of the text below.\n\n{answer}",
    "TL;DR of this article:\n\n{answer}",
)
_SUMMARISING_BOTH: Final = (
    "Summarize: {before}\n\n{answer}",
    "Summarise the following article in a few sentences:\n\n{before}\n{answer}",
    "{before}\n\n{answer}\n\nWrite a short summary of this article.",
    "What are the main points of this text?\n\n{before} {answer}",
)
_ASKED: Final = ("", "What", "Who", "Why", "How", "When", "Which of")
_ASKING: Final = tuple(
    f"{before} {word}"
    for before in (
        "{answer}\n\nQuestion:",
        "Read the text and answer the question.\n\nText: {answer}\n\nQuestion:",
        "Context: {answer}\n\nUsing the context, tell me:",
    )
    for word in _ASKED
)
_SEARCHED: Final = tuple(
    f"{before} {word}"
    for before in (
        "Documents:\n\n{texts}\n\nQuestion:",
        "Use these passages to answer.\n\n{texts}\n\nQuestion:",
        "[1] {before}\n\n[2] {answer}\n\nWith the help of the passages, answer this:",
    )
    for word in _ASKED
)
_PASSAGE: Final = (Say(_PASSAGES), Answer(free=True), Afresh())
_REPORT: Final = (Say(_REPORTS), Answer(free=True), Afresh())

TASKS: Final = (
    Task("chat", 10, (Write(), Answer())),
    Task("turns", 6, (Write(), Answer(SHORT_ANSWER), Say(_FOLLOW_UPS), Answer(SHORT_ANSWER))),
    Task("turns", 4, (Say(_WRITINGS), Answer(), Say(_FOLLOW_UPS), Answer())),
    Task("turns", 3, (Say(_EXPLAINING), Answer(SHORT_ANSWER), Write(), Answer(SHORT_ANSWER))),
    Task("question", 11, (Write(_QUESTION_WORDS, "?\n", 32, 4), Answer(SHORT_ANSWER))),
    Task("translation", 14, (Write(_INTO_ENGLISH, "\n", 64, 6), Answer(SHORT_ANSWER))),
    Task("translation", 4, (Write(_FROM_ENGLISH, "\n", 48, 6), Answer(SHORT_ANSWER))),
    Task("arithmetic", 6, (Say(_SUMS), Answer())),
    Task("problem", 9, (Write(_PROBLEMS, "?", 96, 12), Answer())),
    Task("writing", 4, (Say(_WRITINGS), Answer())),
    Task("explanation", 6, (Say(_EXPLAINING), Answer())),
    Task("list", 3, (Say(_LISTS), Answer())),
    Task("code", 3, (Say(_CODING), Answer())),
    Task("rewriting", 2, (*_PASSAGE, Say(_REWRITING), Answer())),
    Task("extraction", 2, (*_REPORT, Say(_EXTRACTING), Answer())),
    Task("summary", 4, (*_REPORT, Say(_SUMMARISING), Answer(SHORT_ANSWER))),
    Task(
        "summary",
        6,
        (
            Say(_REPORTS),
            Answer(free=True),
            Say(("Please go on with the article.", "Continue with more details.")),
            Answer(free=True),
            Afresh(),
            Say(_SUMMARISING_BOTH),
            Answer(SHORT_ANSWER),
        ),
    ),
    Task("context", 6, (*_PASSAGE, Write(_ASKING, "?\n", 32, 4), Answer(SHORT_ANSWER))),
    Task(
        "passages",
        8,
        (*_PASSAGE, *_PASSAGE, *_REPORT, Write(_SEARCHED, "?\n", 32, 4), Answer(SHORT_ANSWER)),
    ),
)

_TRANSLATED: Final = tuple(order.format("{tongue}") + "{answer}" for order in _ORDERS)
# Beside these, where there are texts that talks can be about, by whether they are to be translated.
_ABOUT: Final = (
    Task("summary", 12, (Read(360, 3000), Say(_SUMMARISING), Answer(SHORT_ANSWER))),
    Task(
        "turns",
        4,
        (Read(360, 1800), Say(_SUMMARISING), Answer(SHORT_ANSWER), Write(), Answer(SHORT_ANSWER)),
    ),
    Task("context", 8, (Read(240, 1500), Write(_ASKING, "?\n", 32, 4), Answer(SHORT_ANSWER))),
    Task(
        "passages",
        10,
        (*(Read(240, 780),) * 3, Write(_SEARCHED, "?\n", 32, 4), Answer(SHORT_ANSWER)),
    ),
    Task("extraction", 4, (Read(360, 2100), Say(_EXTRACTING), Answer())),
    Task("rewriting", 4, (Read(180, 720), Say(_REWRITING), Answer())),
)
_TRANSLATING: Final = (
    Task("translation", 24, (Read(30, 240, foreign=True), Say(_TRANSLATED), Answer(SHORT_ANSWER))),
    Task("translation", 4, (Read(240, 540, foreign=True), Say(_TRANSLATED), Answer())),
)
ABOUT_TEXTS: Final = {False: _ABOUT, True: _TRANSLATING}
