"""Where a slot keeps how its owner samples: words that travel with the slot, and a row of lists. int32; plain numbers.

Words (floats as their bits): what every drawing row needs stands first.
"""

from __future__ import annotations

TEMPERATURE = 0  # float; 0: the largest logit is taken, and no filter looked at
TOP_P = 1  # float; 1: none
TOP_K = 2  # 0: none
SEED = 3  # two words, the low half first
MIN_P_MARGIN = 5  # float: temperature * log(min_p), how far below the largest a logit may be; -inf: any distance
REPETITION = 6  # float, the three penalties
PRESENCE = 7
FREQUENCY = 8
FEATURES = 9  # bits: COUNTED, ALLOWED
NUM_BIASES = 10
NUM_BAD_WORDS = 11
NUM_WORDS = 12

COUNTED = 1  # the slot's token counts are kept, and its penalties apply
ALLOWED = 2  # a token without a bit in the mask cannot come

# Lists. A bias is three columns: an id, which comes once; what is added to its logit (float bits); and the position
# before which it cannot be sampled at all. A bad word stands at the end of its columns, behind -1. The mask is last,
# since its length is the vocabulary's: bit i % 32 of word i // 32 is token i's.
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 16  # a power of two
RECENT = 0  # output token at position p: RECENT + p % MAX_BAD_WORD_LEN; -1 where there was none
BIASES = RECENT + MAX_BAD_WORD_LEN
BAD_WORDS = BIASES + 3 * MAX_BIASES
MASK = BAD_WORDS + MAX_BAD_WORDS * MAX_BAD_WORD_LEN

# Counts, [slots, vocabulary]: twice how often the token is among the outputs, plus one if it is in the prompt.
IN_PROMPT, OUTPUT = 1, 2


def num_list_words(vocab_size: int) -> int:
    """Words of a row of lists."""
    return MASK + -(-vocab_size // 128) * 4  # rows stay 16-byte aligned


# What comes back of a row whose log-probabilities are wanted: 1 + k ids (the sampled token's, then the k largest), the
# sampled one's rank, 1 + k float bits, and a word of padding.


def num_record_words(k: int) -> int:
    return 2 * k + 4
