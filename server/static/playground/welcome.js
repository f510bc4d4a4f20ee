// The playground's introduction: the served model, and example prompts.

import { byId, make, present } from "../common/dom.js";
import { formatCompact, formatCount } from "../common/format.js";

const PROSE = ["Once upon a time", "The capital of France is", "There are three reasons why"];
const PYTHON = ["with open(path) as file:\n    return json.load(", "def read_json(path):"];

/** Describe the model and offer example prompts. */
export function showWelcome({ model, parameters, config, source, examples }) {
  const isExample = source.name === "stdlib"; // the model that comes with Kvasir
  byId("welcome").prepend(
    `This is ${model}: ${formatCompact(parameters)} parameters in `,
    `${formatCount(config.n_layer)} layers`,
    source.train_tokens ? `, trained on ${formatCompact(source.train_tokens)} tokens` : "",
    isExample ? " of Python's standard library. " : ". ",
  );
  present(byId("no-chat"), config);
  const first = isExample ? PYTHON : examples.length ? [] : PROSE;
  for (const text of [...first, ...examples])
    byId("examples").append(make("button", { type: "button" }, text), " ");
}
