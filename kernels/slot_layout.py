"""The layout of a slot's sampling state, int32: words that travel with a step, a row of lists, counts.

Words (floats as their bits): those that every sampled row needs come first.
"""

from __future__ import annotations

TEMPERATURE = 0  # float; 0: greedy, and filters are ignored
TOP_P = 1  # float; 1: none
TOP_K = 2  # 0: none
SEED = 3  # two words, the low half first
MIN_P_MARGIN = 5  # float: temperature * log(min_p), which plus the largest logit is the threshold; -inf: none
REPETITION = 6  # float, the three penalties
PRESENCE = 7
FREQUENCY = 8
FEATURES = 9  # bits: COUNTED, ALLOWED
NUM_BIASES = 10
NUM_BAD_WORDS = 11
NUM_WORDS = 12

COUNTED = 1  # the slot's token counts are kept, and its penalties apply
ALLOWED = 2  # tokens without a bit in the mask are impossible

# Lists. A bias has three columns: a token id, unique in the list; the bias (float bits); and the position before which
# the token is impossible. A bad word is right-aligned in its columns, behind -1. The mask is last, since its length
# depends on the vocabulary: token i is bit i % 32 of word i // 32.
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 16  # a power of two
RECENT = 0  # the output token at position p is at RECENT + p % MAX_BAD_WORD_LEN; -1: none
BIASES = RECENT + MAX_BAD_WORD_LEN
BAD_WORDS = BIASES + 3 * MAX_BIASES
MASK = BAD_WORDS + MAX_BAD_WORDS * MAX_BAD_WORD_LEN

# Counts, [slots, vocabulary]: twice the token's occurrences in the output, plus one if it is in the prompt.
IN_PROMPT, OUTPUT = 1, 2


def num_list_words(vocab_size: int) -> int:
    """Words of a row of lists."""
    return MASK + -(-vocab_size // 128) * 4  # rows stay 16-byte aligned


# A record of log-probabilities: 1 + k ids (the sampled token, then the k largest), the sampled token's rank, 1 + k
# values (float bits), and a word of padding.


def num_record_words(k: int) -> int:
    return 2 * k + 4
