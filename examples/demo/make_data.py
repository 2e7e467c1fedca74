"""Write the data of the demo: everyday requests in free wording, and the one JSON command each of them means.

    python examples/demo/make_data.py [FOLDER]

writes ``train.jsonl`` and ``validation.jsonl``, byte for byte the same every time. The wordings of the validation
requests (HELD_OUT) never occur in training, and some of the names, places and things in them do not either: a
model that has learnt the task answers them, one that has learnt the lines by heart does not.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SEED = 20261
SYSTEM = "JSON"
NUM_TRAIN = 1500
NUM_VALIDATION = 160

OPENERS = ("", "", "", "please ", "hey, ", "ok, ", "could you ", "can you ", "I want you to ", "would you ", "now ")
CLOSERS = ("", "", "", "", " please", ", thanks", " right away", ", thank you")

# A wording with "~" in front is a full sentence: nothing is put before or after it.
TRAIN: dict[str, tuple[str, ...]] = {
    "timer": (
        "set a timer for {minutes} minutes",
        "start a {minutes} minute timer",
        "count down {minutes} minutes",
        "tell me when {minutes} minutes are over",
        "give me a shout in {minutes} minutes",
        "time {minutes} minutes for the {dish}",
        "~the {dish} needs {minutes} minutes, keep an eye on the clock",
        "~{minutes} minutes on the clock, go",
        "run the timer, {minutes} minutes",
        "let me know after {minutes} minutes",
        "~I need a timer, {minutes} minutes",
        "~{dish} goes in now, {minutes} minutes",
        "~how about {minutes} minutes for the {dish}",
        "~I'm making {dish}, stop me after {minutes} minutes",
        "wait {minutes} minutes, then beep",
        "beep when {minutes} minutes have passed",
        "~in {minutes} minutes I have to look after the {dish}, remind me",
        "make it a {minutes} minute timer",
        "~{dish}: {minutes} minutes",
        "warn me once {minutes} minutes are up",
        "keep track of {minutes} minutes",
        "~the {dish} is in the oven, ring in {minutes} minutes",
    ),
    "alarm": (
        "wake me at {time}",
        "set an alarm for {time}",
        "~I have to get up at {time}",
        "ring at {time}",
        "get me out of bed at {time}",
        "~alarm at {time} tomorrow",
        "make sure I am awake by {time}",
        "put the alarm clock on {time}",
        "~I must be up by {time} for the {event}",
        "let the alarm go off at {time}",
        "~the {event} is early, wake-up at {time}",
        "~don't let me sleep past {time}",
        "~tomorrow's alarm: {time}",
        "~early {event}, I get up at {time}",
        "~could the alarm be at {time}",
        "~{time} is when I want to be awake",
        "see that I get up at {time}",
        "~we leave for the {event}, wake everybody at {time}",
        "~sleep until {time}, then the alarm",
        "~morning alarm, {time}",
        "start the alarm at {time}",
        "~my {event} is tomorrow, so {time} for the alarm",
    ),
    "light": (
        "turn {state} the light in the {room}",
        "switch {state} the {room} light",
        "~lights {state} in the {room}",
        "turn the {room} lamp {state}",
        "~{room} lights {state}",
        "switch the lamp in the {room} {state}",
        "~I would like the light {state} in the {room}",
        "make sure the {room} light is {state}",
        "flip the {room} lights {state}",
        "~somebody should turn {state} the lights in the {room}",
        "~we are in the {room}, lights {state}",
        "have the {room} lamps {state}",
        "~{state}, please, all the lights in the {room}",
        "~lamp {state}, {room}",
        "~the {room} lamp goes {state}",
        "check that the light in the {room} is {state}",
        "~all {state} in the {room}, I mean the lights",
        "~let the lamp in the {room} be {state}",
        "~can we have the {room} light {state}",
        "~light {state} wherever there is a lamp in the {room}",
        "keep the lights in the {room} {state}",
        "~nobody likes the {room} like this, switch {state} the light",
    ),
    "heat": (
        "heat the {room} to {degrees} degrees",
        "set the {room} to {degrees} degrees",
        "~it should be {degrees} degrees in the {room}",
        "warm the {room} up to {degrees}",
        "bring the {room} to {degrees} degrees",
        "~I want {degrees} degrees in the {room}",
        "put the heating in the {room} on {degrees}",
        "set the thermostat in the {room} to {degrees}",
        "~{degrees} degrees in the {room} would be nice",
        "~{room} temperature to {degrees}",
        "~the {room} is cold, make it {degrees} degrees",
        "turn the radiator in the {room} to {degrees}",
        "~could the {room} be {degrees} degrees",
        "~too cold here in the {room}, heating to {degrees}",
        "raise the {room} to {degrees}",
        "~{room}: {degrees} degrees",
        "~we like the {room} at {degrees} degrees",
        "let the {room} have {degrees} degrees",
        "change the temperature in the {room} to {degrees} degrees",
        "~the baby sleeps in the {room}, {degrees} degrees is right",
        "~heating, {room}, {degrees}",
        "go to {degrees} degrees in the {room}",
    ),
    "play": (
        "play some {music}",
        "put on {music}",
        "~I feel like listening to {music}",
        "~let's hear some {music}",
        "start the {music} playlist",
        "play {music} for me",
        "~a bit of {music} would be great",
        "~{music} music",
        "put some {music} on while I cook",
        "~I'm in the mood for {music}",
        "find me some good {music}",
        "~time for {music}, turn it up",
        "~I want to dance to {music}",
        "~is there any {music} you can play",
        "~{music} for the party",
        "~give us {music} while we eat",
        "let me hear {music}",
        "~something with {music}, I need to calm down",
        "~my guests love {music}, play that",
        "switch the music to {music}",
        "~more {music}",
        "~what about an hour of {music}",
    ),
    "buy": (
        "add {item} to the shopping list",
        "put {item} on the list",
        "~we are out of {item}",
        "~we need {item}",
        "remember to buy {item}",
        "~there is no {item} left",
        "~{item} is missing in the kitchen, buy more",
        "note down {item} for the shop",
        "get {item} when you order",
        "~I used the last {item}",
        "write {item} on the shopping list",
        "~next time at the store: {item}",
        "~{item}: buy some",
        "~when you go shopping bring {item}",
        "~the {item} has run out",
        "~I can't cook without {item}, get it",
        "~also {item}",
        "pick up {item} from the store",
        "~more {item} for the weekend, write it down",
        "~the shopping list needs {item}",
        "~who ate the {item}, we have to buy it again",
        "~we should get {item} soon",
    ),
    "weather": (
        "~what's the weather in {city}",
        "~how is the weather in {city} today",
        "~will it rain in {city}",
        "tell me the forecast for {city}",
        "~do I need an umbrella in {city}",
        "~is it sunny in {city}",
        "check the weather for {city}",
        "~how warm does it get in {city}",
        "~weather {city}",
        "~what is it like outside in {city}",
        "~any snow in {city} this week",
        "look up the forecast in {city}",
        "~is it cold in {city}",
        "~I fly to {city}, what weather do they have",
        "~{city} weather, today",
        "~does the sun shine in {city}",
        "~can I go out without a jacket in {city}",
        "find out how the weather is in {city}",
        "~rain or sun in {city}",
        "~what should I wear in {city}",
        "~how many degrees are there in {city}",
        "~is it windy over in {city}",
    ),
    "call": (
        "call {name}",
        "phone {name}",
        "ring up {name}",
        "give {name} a call",
        "~I need to talk to {name}",
        "get {name} on the phone",
        "dial {name}",
        "~I want to speak with {name}",
        "start a call with {name}",
        "~put me through to {name}",
        "~let me talk to {name} about the {event}",
        "make a phone call to {name}",
        "~is {name} there, I want to call",
        "~time to call {name}",
        "~{name}, on the phone, now",
        "~I have to tell {name} about the {event}, call",
        "~I promised {name} a call",
        "ring {name} for me",
        "~get me {name}",
        "reach {name}",
        "~{name} should pick up the phone, I am calling",
        "dial the number of {name}",
    ),
}

HELD_OUT: dict[str, tuple[str, ...]] = {
    "timer": (
        "remind me in {minutes} minutes that the {dish} is done",
        "~{minutes} minutes for the {dish}, starting now",
        "begin a countdown of {minutes} minutes",
        "~the {dish} has to come out in {minutes} minutes, set a timer",
    ),
    "alarm": (
        "~tomorrow I get up at {time}, set the alarm",
        "~my {event} starts soon after dawn, get me up at {time}",
        "have the alarm ring at {time}",
        "wake us up at {time} sharp",
    ),
    "light": (
        "~the light in the {room} should be {state}",
        "~{state} with the lights in the {room}",
        "put the {room} lights {state}",
        "~it would help to have the {room} lamp {state}",
    ),
    "heat": (
        "~make the {room} {degrees} degrees warm",
        "~I am freezing in the {room}, turn the heating to {degrees}",
        "adjust the {room} thermostat to {degrees} degrees",
        "get the {room} up to {degrees} degrees",
    ),
    "play": (
        "~how about some {music} now",
        "~I could use a little {music} to relax",
        "turn on some {music}",
        "~nothing beats {music} on an evening like this, play it",
    ),
    "buy": (
        "~the {item} is all gone, put it on the list",
        "~don't forget {item} at the supermarket",
        "~could use more {item}, add it to the shopping",
        "order some {item} too",
    ),
    "weather": (
        "~what will the weather be like in {city} tomorrow",
        "~should I take a coat in {city}",
        "~is there a storm coming to {city}",
        "give me the weather report for {city}",
    ),
    "call": (
        "~can I talk to {name} on the phone",
        "connect me with {name}",
        "try to reach {name} by phone",
        "~{name} is waiting for my call, dial now",
    ),
}

# Values: those in the second tuple occur in validation only.
VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dish": (("rice", "pasta", "bread", "soup", "cake", "eggs", "potatoes", "pizza", "tea"), ("lasagne", "pie")),
    "event": (("meeting", "flight", "exam", "train", "trip", "interview", "class"), ("wedding", "hike")),
    "state": (("on", "off"), ()),
    "room": (
        (
            *("kitchen", "bedroom", "bathroom", "hall", "office", "garage", "cellar", "study", "nursery", "attic"),
            *("lounge", "pantry", "gym", "porch", "shed", "stable", "laundry", "basement", "playroom", "greenhouse"),
        ),
        ("workshop", "library"),
    ),
    "music": (
        (
            *(
                "jazz",
                "rock",
                "piano",
                "opera",
                "folk",
                "techno",
                "blues",
                "guitar",
                "reggae",
                "soul",
                "swing",
                "choir",
            ),
            *("punk", "disco", "salsa", "metal", "gospel", "flute", "harp", "funk", "waltz", "organ", "samba", "drums"),
        ),
        ("country", "violin", "tango"),
    ),
    "item": (
        (
            *(
                "milk",
                "bread",
                "butter",
                "coffee",
                "sugar",
                "salt",
                "cheese",
                "apples",
                "onions",
                "soap",
                "flour",
                "paper",
            ),
            *(
                "rice",
                "eggs",
                "carrots",
                "bananas",
                "candles",
                "cream",
                "jam",
                "juice",
                "lemons",
                "nuts",
                "tea",
                "fish",
            ),
        ),
        ("honey", "oranges", "pepper"),
    ),
    "city": (
        (
            *(
                "Paris",
                "Oslo",
                "Rome",
                "Berlin",
                "Madrid",
                "London",
                "Vienna",
                "Cairo",
                "Tokyo",
                "Boston",
                "Lima",
                "Delhi",
            ),
            *("Athens", "Bern", "Milan", "Seoul", "Denver", "Chicago", "Lisbon", "Moscow", "Miami", "Quito", "Turin"),
        ),
        ("Prague", "Sydney", "Dublin"),
    ),
    "name": (
        (
            *("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Maria", "Peter", "Sarah"),
            *("Adam", "Carol", "Daniel", "Eva", "George", "Helen", "Jack", "Kate", "Martin", "Nina", "Paul", "Robert"),
        ),
        ("Laura", "Thomas", "Alice"),
    ),
}
SLOTS: dict[str, tuple[str, ...]] = {
    "timer": ("minutes",),
    "alarm": ("time",),
    "light": ("room", "state"),
    "heat": ("room", "degrees"),
    "play": ("music",),
    "buy": ("item",),
    "weather": ("city",),
    "call": ("name",),
}
UNSEEN_SHARE = 0.3


class Dice:
    """Random choices that do not change between Python versions: only ``random()`` is promised to stay."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def pick(self, choices: Sequence[str]) -> str:
        return choices[int(self.random() * len(choices))]

    def number(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))


def value_of(slot: str, dice: Dice, held_out: bool) -> str | int:
    """Draw the value of a slot."""
    if slot == "minutes":
        return dice.number(2, 59)
    if slot == "degrees":
        return dice.number(16, 25)
    if slot == "time":
        return f"{dice.number(5, 10)}:{dice.number(0, 11) * 5:02d}"
    seen, unseen = VALUES[slot]
    return dice.pick(unseen if held_out and unseen and dice.random() < UNSEEN_SHARE else seen)


def conversation(intent: str, dice: Dice, held_out: bool) -> tuple[str, str]:
    """Make one request and its command."""
    wording = dice.pick((HELD_OUT if held_out else TRAIN)[intent])
    slots = {slot: value_of(slot, dice, held_out) for slot in (*SLOTS[intent], "dish", "event")}
    request = wording.removeprefix("~").format(**slots)
    if not wording.startswith("~"):
        request = dice.pick(OPENERS) + request + dice.pick(CLOSERS)
    if dice.random() < 0.5:
        request = request[0].upper() + request[1:]
    command = {"do": intent} | {slot: slots[slot] for slot in SLOTS[intent]}
    return request, json.dumps(command, separators=(",", ":"))


def conversations(count: int, dice: Dice, held_out: bool) -> list[tuple[str, str]]:
    """Make ``count`` different conversations, the intents in turn, so that each has its equal share."""
    made: dict[str, str] = {}
    intents = tuple(TRAIN)
    while len(made) < count:
        request, command = conversation(intents[len(made) % len(intents)], dice, held_out)
        made.setdefault(request, command)
    return list(made.items())


def record(request: str, command: str) -> str:
    """Write a conversation as one line of JSON."""
    messages = [("system", SYSTEM), ("user", request), ("assistant", command)]
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}) + "\n"


def write(folder: Path, say: Callable[[str], None] = print) -> None:
    """Write both files into ``folder``."""
    for name, count, held_out in (("train", NUM_TRAIN, False), ("validation", NUM_VALIDATION, True)):
        made = conversations(count, Dice(SEED + held_out), held_out)
        path = folder / f"{name}.jsonl"
        path.write_text("".join(record(*one) for one in made), encoding="utf-8")
        say(f"{path}: {len(made)} conversations")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
