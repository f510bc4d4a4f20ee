// What can be set of a request: the API's fields and ranges, what each does, and the values that the page begins with.

const LONGEST_ANSWER = 128; // what a first click gets; the API's own default differs by route, so the page always says

/** The controls in groups. A `slider` goes over the useful range of a number, which takes all of the API's. */
export function groups(card) {
  const advised = card.generation;
  const most = card.max_model_len;
  const number = (name, min, max, slider, step, neutral, help) => {
    const initial = advised[name] ?? neutral;
    const advice = name in advised ? ` The model's advice: ${initial}.` : "";
    return { kind: "number", name, min, max, slider, step, initial, help: help + advice };
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
          "How much chance there is: 0 takes the likeliest token each time, above 1 flattens the odds.",
        ),
        number(
          "top_p",
          0.001,
          1,
          [0.01, 1],
          0.001,
          1,
          "Only the likeliest tokens that have this share together.",
        ),
        {
          ...number(
            "max_tokens",
            1,
            most,
            [1, most],
            1,
            Math.min(LONGEST_ANSWER, most >> 1),
            "Where the text ends at the latest.",
          ),
          always: true,
        },
        {
          kind: "seed",
          name: "seed",
          min: Number.MIN_SAFE_INTEGER,
          max: Number.MAX_SAFE_INTEGER,
          help: "The same seed gives the same text. Empty: a random one each time.",
        },
      ],
    },
    {
      title: "Other filters",
      fields: [
        number(
          "top_k",
          0,
          2 ** 31 - 1,
          [0, 200],
          1,
          0,
          "Only that many of the likeliest tokens; 0 is all.",
        ),
        number(
          "min_p",
          0,
          1,
          [0, 1],
          0.001,
          0,
          "Only tokens with this share of the likeliest's probability.",
        ),
        number(
          "typical_p",
          0.001,
          1,
          [0.01, 1],
          0.001,
          1,
          "Only the most typical tokens that have this share; 1 is all.",
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
          "Divides the logits of tokens in the prompt or the text; 1 is off.",
        ),
        number(
          "frequency_penalty",
          -2,
          2,
          [-2, 2],
          0.01,
          0,
          "Taken from a token's logit for each time that the text has it.",
        ),
        number(
          "presence_penalty",
          -2,
          2,
          [-2, 2],
          0.01,
          0,
          "Taken once from the logits of tokens that the text has.",
        ),
      ],
    },
    {
      title: "Where it ends",
      fields: [
        {
          kind: "lines",
          name: "stop",
          help: "Strings that end the text, one a line, at most 16; \\n is a break.",
        },
        number(
          "min_tokens",
          0,
          most,
          [0, most],
          1,
          0,
          "Tokens before which nothing ends the text.",
        ),
        {
          kind: "toggle",
          name: "ignore_eos",
          help: "Go on after the model's own end of the text.",
        },
      ],
    },
    {
      title: "More: form and bias",
      fields: [
        {
          kind: "form",
          name: "form",
          label: "the text is",
          help: "What the whole text has to be; it is held to it token by token.",
        },
        {
          kind: "json",
          name: "logit_bias",
          help: "By token id, what is added to its logit, -100 to 100. In JSON.",
          example: '{"11": -100}',
        },
      ],
    },
  ];
}
