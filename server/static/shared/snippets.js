// A request of this page as a command and as a program that send the same.

const OF_OPENAI = new Set([
  ...[
    "model",
    "prompt",
    "messages",
    "temperature",
    "top_p",
    "max_tokens",
    "frequency_penalty",
    "presence_penalty",
  ],
  ...["logit_bias", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs"],
]); // what methods of the openai package take by name; the rest goes into extra_body
const PYTHON = { null: "None", true: "True", false: "False" };

/** A word of a POSIX shell that stands for the text, whatever is in it. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(url, body, hasKey) {
  const key = hasKey ? [`-H "Authorization: Bearer $KVASIR_API_KEY"`] : [];
  const parts = [`curl -N ${quoted(url)}`, ...key, "-H 'Content-Type: application/json'"];
  return [...parts, `-d ${quoted(JSON.stringify(body, null, 2))}`].join(" \\\n  ") + "\n";
}

export function python(baseUrl, body, hasKey) {
  const isChat = "messages" in body;
  const extra = Object.entries(body).filter(([name]) => !takes(name, isChat));
  const named = Object.entries(body).filter(([name]) => takes(name, isChat));
  if (extra.length) named.push(["extra_body", Object.fromEntries(extra)]);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(baseUrl)}, api_key=${hasKey ? 'os.environ["KVASIR_API_KEY"]' : '"none"'})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...named.map(([name, value]) => `    ${name}=${literal(value)},`),
    ")",
    "for event in stream:",
    "    if event.choices:",
    `        print(event.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
    "",
  ].join("\n");
}

const takes = (name, isChat) => OF_OPENAI.has(name) || (isChat && name === "response_format");

/** JSON's strings and numbers are Python's too. */
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "string") return JSON.stringify(value);
  if (value === null || typeof value !== "object") return PYTHON[value] ?? String(value);
  return `{${Object.entries(value)
    .map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`)
    .join(", ")}}`;
}
