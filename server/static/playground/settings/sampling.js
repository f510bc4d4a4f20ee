// Settings of a request: the API's fields and ranges, their descriptions, and initial values.

const INITIAL_MAX_TOKENS = 128; // always sent, because the API's default differs by route

/**
 * Return the controls in groups. A `slider` covers the useful range; the number accepts the API's
 * range.
 */
export function groups(card) {
  const recommended = card.generation;
  const most = card.max_model_len;
  const number = (name, min, max, slider, step, neutral, help) => {
    const initial = recommended[name] ?? neutral;
    const recommendation = name in recommended ? ` Recommended: ${initial}.` : "";
    return { kind: "number", name, min, max, slider, step, initial, help: help + recommendation };
  };
  return [
    {
      fields: [
        number(
          "temperature",
          0,
          100,
          [0, 2],
          0.01,
          1,
          "Randomness: 0 always takes the likeliest token, above 1 flattens the distribution.",
        ),
        number(
          "top_p",
          0.001,
          1,
          [0.01, 1],
          0.001,
          1,
          "Keep the likeliest tokens whose probabilities add up to this value.",
        ),
        {
          ...number(
            "max_tokens",
            1,
            most,
            [1, most],
            1,
            Math.min(INITIAL_MAX_TOKENS, most >> 1),
            "Maximum number of new tokens.",
          ),
          always: true,
        },
        {
          kind: "seed",
          name: "seed",
          min: Number.MIN_SAFE_INTEGER,
          max: Number.MAX_SAFE_INTEGER,
          help: "The same seed gives the same text. Empty: a random seed for each request.",
        },
      ],
    },
    {
      title: "More filters",
      fields: [
        number(
          "top_k",
          0,
          2 ** 31 - 1,
          [0, 200],
          1,
          0,
          "Keep this many of the likeliest tokens; 0 keeps all.",
        ),
        number(
          "min_p",
          0,
          1,
          [0, 1],
          0.001,
          0,
          "Keep tokens with at least this fraction of the likeliest token's probability.",
        ),
        number(
          "typical_p",
          0.001,
          1,
          [0.01, 1],
          0.001,
          1,
          "Keep the most typical tokens whose probabilities add up to this value; 1 keeps all.",
        ),
      ],
    },
    {
      title: "Repetition",
      fields: [
        number(
          "repetition_penalty",
          0.01,
          100,
          [0.5, 2],
          0.01,
          1,
          "Divides the logits of tokens that the prompt or the text contains; 1 is off.",
        ),
        number(
          "frequency_penalty",
          -2,
          2,
          [-2, 2],
          0.01,
          0,
          "Subtracted from a token's logit for each time the text contains it.",
        ),
        number(
          "presence_penalty",
          -2,
          2,
          [-2, 2],
          0.01,
          0,
          "Subtracted once from the logits of tokens that the text contains.",
        ),
      ],
    },
    {
      title: "Stopping",
      fields: [
        {
          kind: "lines",
          name: "stop",
          help: "Strings that end the text, one per line, at most 16; \\n is a line break.",
        },
        number(
          "min_tokens",
          0,
          most,
          [0, most],
          1,
          0,
          "Minimum number of new tokens before the text may end.",
        ),
        {
          kind: "toggle",
          name: "ignore_eos",
          help: "Continue after the model's end-of-text token.",
        },
      ],
    },
    {
      title: "Constraints and logit bias",
      fields: [
        {
          kind: "form",
          name: "form",
          label: "constrain to",
          help: "Allow only tokens that keep the text in this form.",
        },
        {
          kind: "json",
          name: "logit_bias",
          help: "JSON object: the value, -100 to 100, to add to the logit of each token id.",
          example: '{"11": -100}',
        },
      ],
    },
  ];
}
