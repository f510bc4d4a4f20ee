// A request of this page as an equivalent curl command and Python program.

// Named parameters of the openai package; other fields go into extra_body.
const OPENAI_FIELDS = (
  "model prompt messages temperature top_p max_tokens frequency_penalty presence_penalty " +
  "logit_bias seed stop stream stream_options logprobs top_logprobs"
).split(" ");
const PYTHON = { null: "None", true: "True", false: "False" };

/** Quote a text as one word of a POSIX shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return a curl command that sends `body`. */
export function curl(url, body, hasKey) {
  const key = hasKey ? [`-H "Authorization: Bearer $KVASIR_API_KEY"`] : [];
  const parts = [`curl -N ${quoted(url)}`, ...key, "-H 'Content-Type: application/json'"];
  return [...parts, `-d ${quoted(JSON.stringify(body, null, 2))}`].join(" \\\n  ") + "\n";
}

/** Return a Python program that sends `body` with the openai package. */
export function python(baseUrl, body, hasKey) {
  const isChat = "messages" in body;
  const known = isChat ? [...OPENAI_FIELDS, "response_format"] : OPENAI_FIELDS;
  const { named = [], extra = [] } = Object.groupBy(Object.entries(body), ([name]) =>
    known.includes(name) ? "named" : "extra",
  );
  const key = hasKey ? 'os.environ["KVASIR_API_KEY"]' : '"none"';
  const text = isChat ? 'delta.content or ""' : "text";
  if (extra.length) named.push(["extra_body", Object.fromEntries(extra)]);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(baseUrl)}, api_key=${key})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...named.map(([name, value]) => `    ${name}=${literal(value)},`),
    ")",
    "for event in stream:",
    "    if event.choices:",
    `        print(event.choices[0].${text}, end="", flush=True)`,
    "",
  ].join("\n");
}

/** Write a value as Python. JSON's strings and numbers are valid Python. */
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "string") return JSON.stringify(value);
  if (value === null || typeof value !== "object") return PYTHON[value] ?? String(value);
  const pairs = Object.entries(value).map(([name, one]) => `${literal(name)}: ${literal(one)}`);
  return `{${pairs.join(", ")}}`;
}
