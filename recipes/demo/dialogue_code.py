"""Small functions that the synthetic dialogues ask for: name, wishes, remark, source.

`_sources` holds the code alone; wishes and remarks are kept beside it by name, so that the code
stays plain to read and a test can execute it.
"""

from __future__ import annotations

_SOURCES = '''
def add(a, b):
    return a + b
#
def is_even(n):
    return n % 2 == 0
#
def square(x):
    return x * x
#
def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
#
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
#
def is_prime(n):
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True
#
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a
#
def reverse(text):
    return text[::-1]
#
def is_palindrome(text):
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]
#
def count_words(text):
    return len(text.split())
#
def count_vowels(text):
    return sum(1 for c in text.lower() if c in "aeiou")
#
def capitalize_words(text):
    return " ".join(word.capitalize() for word in text.split())
#
def longest_word(text):
    return max(text.split(), key=len)
#
def word_counts(text):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts
#
def mean(values):
    if not values:
        raise ValueError("mean of an empty list")
    return sum(values) / len(values)
#
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
#
def largest(values):
    best = values[0]
    for value in values:
        if value > best:
            best = value
    return best
#
def flatten(items):
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result
#
def unique(items):
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result
#
def chunks(items, size):
    for start in range(0, len(items), size):
        yield items[start:start + size]
#
def group_by(items, key):
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
#
def merge(first, second):
    result = dict(first)
    result.update(second)
    return result
#
def invert(mapping):
    return {value: key for key, value in mapping.items()}
#
def binary_search(items, target):
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
#
def bubble_sort(items):
    items = list(items)
    for end in range(len(items) - 1, 0, -1):
        for i in range(end):
            if items[i] > items[i + 1]:
                items[i], items[i + 1] = items[i + 1], items[i]
    return items
#
def quicksort(items):
    if len(items) < 2:
        return items
    pivot, rest = items[0], items[1:]
    smaller = [x for x in rest if x < pivot]
    larger = [x for x in rest if x >= pivot]
    return quicksort(smaller) + [pivot] + quicksort(larger)
#
def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for line in file]
#
def read_json(path):
    import json

    with open(path, encoding="utf-8") as file:
        return json.load(file)
#
def read_csv(path):
    import csv

    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
#
def celsius_to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32
#
def clamp(value, low, high):
    return max(low, min(value, high))
#
def digits_sum(n):
    return sum(int(digit) for digit in str(abs(n)))
#
def to_binary(n):
    return format(n, "b")
#
def is_leap_year(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
#
def transpose(matrix):
    return [list(row) for row in zip(*matrix)]
#
def dot(a, b):
    return sum(x * y for x, y in zip(a, b))
#
def primes(limit):
    sieve = [True] * (limit + 1)
    result = []
    for n in range(2, limit + 1):
        if sieve[n]:
            result.append(n)
            for multiple in range(n * n, limit + 1, n):
                sieve[multiple] = False
    return result
#
def retry(function, attempts=3):
    for attempt in range(attempts):
        try:
            return function()
        except OSError:
            if attempt == attempts - 1:
                raise
#
def timed(function):
    import functools
    import time

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        print(f"{function.__name__}: {time.perf_counter() - start:.3f} s")
        return result

    return wrapper
#
def slugify(text):
    import re

    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
#
def anagrams(first, second):
    return sorted(first.lower()) == sorted(second.lower())
#
def fizzbuzz(n):
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)
#
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
#
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5

    def __repr__(self):
        return f"Point({self.x}, {self.y})"
#
class Counter:
    def __init__(self):
        self.count = 0

    def increment(self, step=1):
        self.count += step
        return self.count
'''

# name: wishes separated by "|", then a remark after "=>"
_ABOUT = """
add: adds two numbers|returns the sum of two values => The + operator does the work.
is_even: checks if a number is even|tells whether n is even => A number is even if n % 2 is 0.
square: returns the square of a number|squares a number => Multiply the number by itself.
factorial: computes the factorial of n|returns n! => Multiply the numbers from 2 to n in a loop.
fibonacci: returns the n-th Fibonacci number|computes Fibonacci numbers => Two variables are enough.
is_prime: checks if a number is prime|tells whether n is a prime => Divisors up to the square root.
gcd: computes the greatest common divisor|finds the gcd of two numbers => Euclid's algorithm.
reverse: reverses a string|returns a string backwards => A slice with step -1 reverses it.
is_palindrome: checks if a text is a palindrome|detects palindromes => Compare with the reverse.
count_words: counts the words of a text|returns the number of words => Split at spaces and count.
count_vowels: counts the vowels in a string|returns the number of vowels => Go through the letters.
capitalize_words: capitalizes every word|makes each word start with a capital => Split and join.
longest_word: finds the longest word|returns the longest word of a text => Use max with key=len.
word_counts: counts how often each word occurs|builds a table of word counts => A dict holds counts.
mean: computes the mean of a list|returns the average of numbers => An empty list is an error.
median: computes the median of a list|returns the median => Sort and take the middle.
largest: finds the largest value|returns the maximum without max => Keep the best so far.
flatten: flattens a nested list|turns nested lists into one list => Recursion handles any depth.
unique: removes duplicates but keeps the order|gives unique items => A set remembers what was seen.
chunks: splits a list into chunks|yields parts of a given size => A generator saves memory.
group_by: groups items by a key|builds a dict of groups => Use setdefault to start each group.
merge: merges two dictionaries|combines two dicts => The second one wins.
invert: inverts a dictionary|swaps keys and values => A dict comprehension does it.
binary_search: finds an item in a sorted list|does a binary search => Halve the range each time.
bubble_sort: sorts a list with bubble sort|implements bubble sort => Swap neighbours until sorted.
quicksort: sorts a list with quicksort|implements quicksort => Split by a pivot and recurse.
read_lines: reads a file line by line|returns all lines of a file => Strip the newline of each line.
read_json: loads a JSON file|reads JSON from a file => The json module parses it.
read_csv: reads a CSV file|loads a CSV file into dicts => csv.DictReader takes keys from row one.
celsius_to_fahrenheit: converts Celsius to Fahrenheit|gives Fahrenheit => F = C * 9/5 + 32.
clamp: limits a value to a range|keeps a value between low and high => Combine min and max.
digits_sum: sums the digits of a number|adds up all digits => Turn the number into a string.
to_binary: converts a number to binary|returns the binary digits => format with "b" does it.
is_leap_year: checks for leap years|finds out if a year is a leap year => Every fourth, mostly.
transpose: transposes a matrix|swaps rows and columns => zip with a star does it.
dot: computes the dot product of two vectors|returns a dot product => Multiply in pairs and sum.
primes: lists all primes up to a limit|computes a list of primes => The sieve of Eratosthenes.
retry: calls a function again if it fails|retries a function => The last error is raised.
timed: measures the time of a function|is a timing decorator => functools.wraps keeps the name.
slugify: turns a title into a slug|makes a URL slug from text => Replace what is no letter or digit.
anagrams: checks if two words are anagrams|detects anagrams => Sort the letters of both.
fizzbuzz: prints FizzBuzz up to n|plays FizzBuzz => Check 15 before 3 and 5.
Stack: works as a stack|offers push and pop => A list holds the items, so a class fits.
Point: represents a point in the plane|computes distances between points => A class with x and y.
Counter: counts how often it is called|keeps a count => A class holds the state.
"""


def _functions() -> list[tuple[str, tuple[str, ...], str, str]]:
    """Join the sources with what is said about them."""
    about = {}
    for line in _ABOUT.strip().split("\n"):
        name, _, rest = line.partition(": ")
        wishes, _, remark = rest.partition(" => ")
        about[name] = (tuple(wishes.split("|")), remark)
    joined = []
    for source in _SOURCES.strip().split("\n#\n"):
        name = source.split("(")[0].split(":")[0].split()[-1]
        joined.append((name, *about[name], source.strip() + "\n"))
    return joined


FUNCTIONS = _functions()
