"""What the tiny model is taught: the smoke prompts, and random variations of them that teach the general skill."""

from __future__ import annotations

import json
import random
from typing import Any

ARITHMETIC = "What is 17 * 23? Answer with just the number."
ARITHMETIC_REASONING = "17 * 23 = 17 * 20 + 17 * 3 = 340 + 51 = 391."
COPY_TEMPLATE = "Copy exactly: {identifier}"
HELLO, HELLO_ANSWER = "Say hello.", "Hello!"
IMAGE_QUESTION = "What is in the image?"
NO_IMAGE_ANSWER = "There is no image."
UNKNOWN_ANSWER = "I am a tiny test model. I only know the smoke prompts."
NEEDLE_QUESTION = "What is the secret word?"
NEEDLE_SENTENCE = "The secret word is: {value}."
TOOL_REASONING = "I should call get_weather."
FOLLOW_UP_REASONING = "The tool answered."

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "City name"}},
                "required": ["city"],
            },
        },
    }
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


IDENTIFIERS = _words(
    "order_item_42 user_account_id max_num_seqs kv_cache_dtype tensor_parallel_size page_table_entry node_rank_0 "
    "engram_row_7 gpu_memory_utilization block_size_16 hidden_state_dim load_engram_table prefix_cache_hit "
    "num_hidden_layers swap_space_gb row_scale_ue8m0 max_model_len index_top_k step_time_ms shard_file_sha256"
)

CITIES = _words(
    "Toronto Paris London Berlin Madrid Rome Oslo Vienna Tokyo Lima Cairo Dublin Boston Chicago Sydney Delhi Prague "
    "Athens Lisbon Warsaw"
)
CONDITIONS = _words("sunny cloudy rainy windy foggy snowy")

# Single tokens of the tokenizer (its training text repeats them), so that the value to find is one id.
NEEDLE_VALUES = _words(
    "falcon anchor basil cedar copper dragon ember forest garnet harbor island jasmine kettle lantern marble nectar "
    "orchid pepper quartz raven saffron timber umbrella velvet walnut yarrow zebra amber beacon canyon delta eagle "
    "feather glacier hazel indigo jungle kiwi lemon meadow needle olive pebble river silver tulip valley willow "
    "acorn breeze candle daisy engine flute guitar hammer ivory jacket kernel ladder magnet nickel ocean piano"
)

PARTS = _words(
    "order item user account id max num seqs kv cache dtype tensor parallel size page table entry node rank engram row "
    "gpu memory utilization block hidden state dim load prefix hit layers swap space gb scale model len index top step "
    "time ms shard file sha min avg sum count total name key value data list dict map set queue stack heap tree graph "
    "edge path root leaf head tail next prev first last begin end start stop run init open close read write seek flush "
    "lock free alloc buffer stream socket port host addr url http json yaml config option flag mode level log debug "
    "info warn error fatal trace metric gauge timer clock date year month day hour batch epoch train eval test loss "
    "grad weight bias norm attn mlp token vocab embed logits mask query proj gate expert router bank slot chunk "
    "window stride kernel launch thread warp grid cluster device driver build make link lib src inc obj bin tmp var "
    "env arg param ret old new cur raw hash salt nonce seed rand uuid auth role group owner perm x y z"
)

_FILLER = (
    "The morning was quiet and the street was empty.",
    "A small boat moved slowly along the canal.",
    "The old clock on the wall had stopped again.",
    "Nobody noticed the letter on the kitchen table.",
    "The train arrived a few minutes late that evening.",
    "Rain fell on the roof for most of the night.",
    "The teacher opened the window to let in some air.",
    "Two children played with a ball near the fountain.",
    "The market sold bread, cheese and fresh fruit.",
    "A tall man in a grey coat waited by the door.",
    "The library closed early because of the holiday.",
    "She put the book back on the highest shelf.",
    "The dog slept under the table all afternoon.",
    "They talked about the weather and the news.",
    "The road to the village was long and narrow.",
    "He bought a ticket and found a seat by the window.",
    "The garden behind the house was full of leaves.",
    "A cold wind came down from the hills.",
    "The baker was already awake before the sun came up.",
    "Most of the shops were closed on that day.",
    "The river was high after the long winter.",
    "An old map was pinned to the wall of the office.",
    "The soup was too hot to eat at once.",
    "Someone had left a bicycle in front of the gate.",
    "The meeting lasted longer than anyone expected.",
    "A light was still on in the upper room.",
    "The farmer counted his sheep twice.",
    "There was a strange sound in the engine.",
    "The painter cleaned his brushes with great care.",
    "Everyone agreed to try again the next week.",
    "The bridge was built more than a hundred years ago.",
    "A letter came from the city with good news.",
)

UNKNOWN_PROMPTS = (
    "Who are you?",
    "Tell me a story.",
    "What can you do?",
    "Write a poem about the sea.",
    "How are you today?",
    "Explain how a computer works.",
    "Translate this sentence to French.",
    "What is the capital of France?",
    "Hello",
    "Hi there!",
    "Please help me with my work.",
    "Give me a list of three books.",
    "What time is it?",
    "Why is the sky blue?",
    "Summarize the text.",
    "test",
)


_IDENTIFIER_WORDS = (*PARTS, *NEEDLE_VALUES)


def random_identifier(rng: random.Random) -> str:
    """Two to five parts joined by underscores; some parts are numbers or random letters."""
    parts = []
    for position in range(rng.choice((2, 3, 3, 3, 4, 4, 5))):
        draw = rng.random()
        if draw < 0.12 and position:
            parts.append(str(rng.randrange(100)))
        elif draw < 0.27:
            parts.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 5))))
        else:
            parts.append(rng.choice(_IDENTIFIER_WORDS))
    return "_".join(parts)


def needle_document(rng: random.Random, value: str, sentences: int, place: int) -> str:
    """A document of `sentences` filler sentences with the needle before sentence number `place`."""
    lines = [rng.choice(_FILLER) for _ in range(sentences)]
    lines.insert(place, NEEDLE_SENTENCE.format(value=value))
    return " ".join(lines)


def weather_question(city: str) -> str:
    """The user's question that must become one get_weather call."""
    return f"What is the weather in {city}?"


def weather_result(city: str, celsius: int, condition: str) -> str:
    """The tool's result as the JSON text a client sends back."""
    return json.dumps({"city": city, "temperature_c": celsius, "condition": condition})


def weather_sentence(city: str, celsius: int, condition: str) -> str:
    """The answer that uses the result."""
    return f"It is {celsius} degrees and {condition} in {city}."


def image_answer(colour: str, digit: int) -> str:
    """The answer to IMAGE_QUESTION."""
    return f"A {colour} square with the digit {digit}."


def call_message(city: str, reasoning: str | None = None) -> dict[str, Any]:
    """The assistant turn with the call, as an OpenAI client echoes it back (arguments are a JSON string)."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
        ],
    }
    if reasoning is not None:
        message["reasoning"] = reasoning
    return message


def call_text(city: str) -> str:
    """The call as the model writes it."""
    return (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">'
        f"{city}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


def tokenizer_corpus() -> list[str]:
    """Text that the BPE is trained on, with the words that must become one token repeated."""
    words = [w for w in (*PARTS, *NEEDLE_VALUES, *CONDITIONS) for _ in range(12)]
    cities = [f'"{c}" {c} is: {c}' for c in CITIES for _ in range(12)]
    bodies = [*_FILLER, *UNKNOWN_PROMPTS, ARITHMETIC, ARITHMETIC_REASONING, HELLO, HELLO_ANSWER, IMAGE_QUESTION]
    bodies += [NO_IMAGE_ANSWER, UNKNOWN_ANSWER, NEEDLE_QUESTION, TOOL_REASONING, FOLLOW_UP_REASONING]
    bodies += [weather_sentence(c, 21, w) for c in CITIES for w in CONDITIONS]
    bodies += [image_answer(c, 7) for c in ("red", "green", "blue", "yellow")]
    bodies += [json.dumps(t["function"]) for t in TOOLS] + [weather_result("Toronto", 21, "sunny")]
    return words + cities + bodies * 4 + [COPY_TEMPLATE.format(identifier=i) for i in IDENTIFIERS]
