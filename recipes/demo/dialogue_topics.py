"""What the synthetic dialogues are about: questions, reasoning and answers from templates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from dialogue_code import FUNCTIONS

Exchange = tuple[str, str, str]
CITIES = (
    "Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid", "Vienna", "Lisbon",
    "Dublin", "Prague", "Athens", "Warsaw", "Helsinki", "Nairobi", "Seoul", "Toronto", "Boston",
)
SKIES = ("sunny", "cloudy", "light rain", "heavy rain", "snow", "windy", "clear", "fog")
WORDS = (
    "apple", "river", "stone", "cloud", "garden", "window", "silver", "mountain", "letter",
    "basket", "candle", "forest", "harbor", "island", "jacket", "kettle", "ladder", "mirror",
)
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas")
FILES = (
    "main.py", "app.py", "utils.py", "config.json", "README.md", "tests/test_app.py", "setup.cfg",
    "src/parser.py", "src/models.py", "docs/index.md", "data/items.csv", "Makefile",
)
SUBJECTS = (
    "the release date of Python 3.12", "how to sort a dictionary by value", "the tallest mountain",
    "the speed of light", "asyncio timeouts", "the capital of Peru", "type hints for callbacks",
    "how to read a CSV file", "the boiling point of water", "unit tests with pytest",
)


def coding(rng: random.Random) -> Exchange:
    """A request for a small function, answered with its source."""
    name, asks, about, source = rng.choice(FUNCTIONS)
    ask = rng.choice(asks)
    question = rng.choice(
        (
            f"Write a Python function that {ask}.",
            f"Write a function `{name}` that {ask}.",
            f"Can you write a Python function which {ask}?",
            f"I need a function that {ask}.",
            f"How do I write a function that {ask} in Python?",
            f"Please implement `{name}`: it {ask}.",
        )
    )
    reasoning = rng.choice(
        (
            f"The user wants a function that {ask}. {about}",
            f"I will write `{name}`. {about}",
            f"A short function is enough. {about}",
            about,
        )
    )
    opening = rng.choice(("", "Here is the function:\n\n", "Here you go:\n\n", "Sure.\n\n"))
    closing = rng.choice(("", "", f"\n\n{about}", "\n\nTell me if you need a test for it."))
    return question, reasoning, f"{opening}```python\n{source}```{closing}"


def arithmetic(rng: random.Random) -> Exchange:
    """A sum, a product or a short word problem."""
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    kind = rng.randrange(5)
    if kind == 0:
        text, work, value = f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", a + b
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        text, work, value = f"What is {a} - {b}?", f"{a} - {b} = {a - b}.", a - b
    elif kind == 2:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        text, work, value = f"What is {a} * {b}?", f"{a} times {b} is {a * b}.", a * b
    elif kind == 3:
        thing, name = rng.choice(WORDS), rng.choice(NAMES)
        text = f"{name} has {a} {thing}s and buys {b} more. How many {thing}s does {name} have?"
        work, value = f"Start with {a}, add {b}: {a} + {b} = {a + b}.", a + b
    else:
        b = rng.randint(2, 12)
        value = rng.randint(2, 12)
        text, work = f"Divide {value * b} by {b}.", f"{value * b} / {b} = {value}."
    return text, work, rng.choice((f"{value}", f"The answer is {value}.", work))


def greeting(rng: random.Random) -> Exchange:
    """Small talk."""
    name = rng.choice(NAMES)
    question, answer = rng.choice(
        (
            ("Hello", "Hello! How can I help you today?"),
            ("Hi there!", "Hi! What can I do for you?"),
            (f"Hello, I am {name}.", f"Hello {name}! How can I help you?"),
            (f"Hi, my name is {name}.", f"Nice to meet you, {name}. What can I do for you?"),
            ("Good morning!", "Good morning! How can I help?"),
            ("Good evening.", "Good evening! What would you like to do?"),
            ("How are you?", "I am fine, thank you. How can I help you?"),
            ("Who are you?", "I am a small language model that writes Python."),
            ("What can you do?", "I can write small Python functions and call simple tools."),
            ("Goodbye", "Goodbye! Have a nice day."),
            ("Can you help me?", "Of course. What do you need?"),
        )
    )
    reasoning = rng.choice(
        ("The user greets me. I answer politely.", "A short friendly reply is enough.", "")
    )
    return question, reasoning, answer


def words(rng: random.Random) -> Exchange:
    """Questions about words and lists whose answer a line of Python gives."""
    word = rng.choice(WORDS)
    chosen = rng.sample(WORDS, 4)
    numbers = [rng.randint(1, 60) for _ in range(rng.randint(3, 6))]
    kind = rng.randrange(6)
    if kind == 0:
        return (f"How many letters are in the word {word}?",
                f"Spell it: {' '.join(word)}. That makes {len(word)}.",
                f"The word {word} has {len(word)} letters.")
    if kind == 1:
        return (f"Write {word} in upper case.", "Change every letter.", word.upper())
    if kind == 2:
        order = ", ".join(sorted(chosen))
        return (f"Sort these words: {', '.join(chosen)}.", "Compare the first letters.", order)
    if kind == 3:
        return (f"What is the largest of {', '.join(map(str, numbers))}?",
                f"Go through the list; {max(numbers)} is the largest.", f"{max(numbers)}")
    if kind == 4:
        order = ", ".join(map(str, sorted(numbers)))
        return f"Sort the numbers {', '.join(map(str, numbers))}.", "From small to large.", order
    expression, result = rng.choice(
        ((f"len('{word}')", len(word)), (f"'{word}'.upper()", word.upper()),
         (f"'{word}'[0]", word[0]), (f"sorted({numbers})", sorted(numbers)),
         (f"max({numbers})", max(numbers)), (f"sum({numbers})", sum(numbers)))
    )
    value = repr(result)
    return (f"What does `{expression}` return in Python?",
            f"Evaluate it step by step: the result is {value}.", f"It returns `{value}`.")


EXPLAIN = (
    ("What is a list comprehension?", "It builds a list from a loop in one expression, for example "
     "`[x * x for x in range(5)]`."),
    ("What is the difference between a list and a tuple?", "A list can be changed after it is "
     "made; a tuple cannot. Use a tuple for values that belong together."),
    ("What does `with open(path) as file` do?", "It opens the file and closes it when the block "
     "ends, also if an error is raised."),
    ("What is a decorator?", "A decorator is a function that takes a function and returns another "
     "one, usually with something added before or after the call."),
    ("What is a generator?", "A generator is a function that uses `yield`. It makes its values one "
     "at a time, so a long series needs little memory."),
    ("What does `if __name__ == \"__main__\":` mean?", "The block runs only when the file is "
     "started as a script, not when it is imported."),
    ("When should I use a set?", "Use a set when you only ask whether a value is present, or to "
     "remove duplicates. Its lookups are fast."),
    ("What is `self`?", "It is the instance on which the method was called. Python passes it as "
     "the first argument."),
    ("What does `*args` do?", "It collects the remaining positional arguments into a tuple."),
    ("What does `**kwargs` do?", "It collects the remaining keyword arguments into a dict."),
    ("How do I handle an exception?", "Put the call into a `try` block and catch the error that "
     "you expect:\n\n```python\ntry:\n    value = int(text)\nexcept ValueError:\n"
     "    value = 0\n```"),
    ("How do I read a file in Python?", "Open it in a `with` block:\n\n```python\n"
     "with open(path, encoding=\"utf-8\") as file:\n    text = file.read()\n```"),
    ("How do I write JSON to a file?", "Use the json module:\n\n```python\nimport json\n\n"
     "with open(path, \"w\") as file:\n    json.dump(data, file, indent=2)\n```"),
)


def explain(rng: random.Random) -> Exchange:
    """A question about the language."""
    question, answer = rng.choice(EXPLAIN)
    reasoning = rng.choice(
        ("I explain it briefly.", "A short explanation with an example will do.", "")
    )
    return question, reasoning, answer


PLAIN: tuple[Callable[[random.Random], Exchange], ...] = (
    coding, arithmetic, greeting, words, explain
)
WEIGHTS = (12, 3, 1, 2, 1)
ToolTask = tuple[str, str, list[dict[str, object]], list[str], str, str]


def weather(rng: random.Random) -> ToolTask:
    """The weather of one city or two."""
    cities = rng.sample(CITIES, rng.choice((1, 1, 2)))
    found = [(rng.randint(-8, 34), rng.choice(SKIES)) for _ in cities]
    unit: dict[str, object] = {"unit": "c"} if rng.random() < 0.3 else {}
    question = rng.choice(("What is the weather in {}?", "How is the weather in {} today?",
                           "Is it cold in {}?", "Tell me the weather in {}."))
    answers = [f"{c}: {t}°C, {s}." for c, (t, s) in zip(cities, found, strict=True)]
    if len(cities) == 1:
        answers = [f"It is {found[0][0]}°C and {found[0][1]} in {cities[0]}."]
    return (question.format(" and ".join(cities)),
            f"I need the weather in {' and '.join(cities)}, so I call get_weather.",
            [{"city": c, **unit} for c in cities],
            [json.dumps({"temperature": t, "sky": s}) for t, s in found],
            "The tool gave the result. Report it.", " ".join(answers))


def clock(rng: random.Random) -> ToolTask:
    """The time somewhere."""
    city, time = rng.choice(CITIES), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return (rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}.")),
            f"The local time of {city} comes from get_time.", [{"city": city}], [time],
            "Give the time.", f"It is {time} in {city}.")


def search(rng: random.Random) -> ToolTask:
    """Something looked up."""
    subject = rng.choice(SUBJECTS)
    limit: dict[str, object] = {"limit": rng.randint(1, 5)} if rng.random() < 0.4 else {}
    found = f"A page about {subject}."
    return (rng.choice((f"Search for {subject}.", f"Look up {subject}.", f"Find {subject}.")),
            f"I search the web for {subject}.", [{"query": subject, **limit}], [found],
            "Summarise the result.", f"I found a page about {subject}.")


def reading(rng: random.Random) -> ToolTask:
    """A file read and described."""
    path = rng.choice(FILES)
    name, asks, _, source = rng.choice(FUNCTIONS)
    return (rng.choice((f"What does {path} do?", f"Read {path} and explain it.",
                        f"Show me what is in {path}.")),
            f"I have to read {path} first.", [{"path": path}], [source],
            f"The file defines {name}.", f"`{path}` defines `{name}`, which {asks[0]}.")


def writing(rng: random.Random) -> ToolTask:
    """A function saved to a file."""
    path = rng.choice([f for f in FILES if f.endswith(".py")])
    name, asks, about, source = rng.choice(FUNCTIONS)
    return (f"Write a function that {rng.choice(asks)} into {path}.",
            f"{about} I save it with write_file.", [{"content": source, "path": path}],
            [f"wrote {len(source)} bytes"], "The file is written.",
            f"I wrote `{name}` to `{path}`.")


def listing(rng: random.Random) -> ToolTask:
    """The files of a folder."""
    folder, files = rng.choice(("src", "tests", "docs", ".")), rng.sample(FILES, 3)
    arguments: dict[str, object] = {} if folder == "." else {"folder": folder}
    return (rng.choice((f"Which files are in {folder}?", f"List the files of {folder}.")),
            f"I list {folder} with list_files.", [arguments], ["\n".join(files)],
            "Name the files.", f"There are {len(files)} files: {', '.join(files)}.")


def calculation(rng: random.Random) -> ToolTask:
    """A sum too long for the head."""
    a, b, c = rng.randint(100, 9999), rng.randint(100, 9999), rng.randint(2, 99)
    expression, value = rng.choice(
        ((f"{a} * {b}", a * b), (f"{a} + {b} * {c}", a + b * c),
         (f"({a} - {b}) * {c}", (a - b) * c))
    )
    return (rng.choice((f"Compute {expression}.", f"What is {expression}?")),
            "The numbers are large, so I use calculate.", [{"expression": expression}],
            [str(value)], "Report the value.", f"{expression} = {value}")


def running(rng: random.Random) -> ToolTask:
    """A line of Python run by the tool."""
    numbers = [rng.randint(1, 50) for _ in range(4)]
    code, value = rng.choice(
        ((f"print(sum({numbers}))", sum(numbers)), (f"print(sorted({numbers}))", sorted(numbers)),
         (f"print(max({numbers}))", max(numbers)), (f"print(len({numbers}))", len(numbers)))
    )
    return (f"Run `{code}`.", "I run the code with run_python.", [{"code": code}], [f"{value}\n"],
            "Report what was printed.", f"It prints `{value}`.")


TASKS: dict[str, Callable[[random.Random], ToolTask]] = {
    "get_weather": weather, "get_time": clock, "web_search": search, "read_file": reading,
    "write_file": writing, "list_files": listing, "calculate": calculation, "run_python": running,
}


def tool_task(rng: random.Random, name: str) -> ToolTask:
    """Question, reasoning, arguments of each call, results, closing reasoning, answer."""
    return TASKS[name](rng)
