// Events of a stream in one form for all routes: { text, tokens, promptIds, finish, usage }, and of a
// chat { reasoning, calls }.
//
// A token is { id, name, text, logprob, top: [{ id, name, text, logprob }] }. `text` is null if the
// token is only a part of a character. promptIds: in the first event of an answer.

const BYTES = "bytes:"; // prefix with which /v1/completions names a token that is not valid text

/** Read an event of /v1/completions. */
export function fromCompletion({ choices: [choice], usage }) {
  const scored = choice?.logprobs;
  const tokens = (scored?.tokens ?? []).map((name, i) => {
    const ids = scored.top_token_ids?.[i] ?? {};
    const read = ([one, logprob]) => ({ ...parseName(one), id: ids[one], logprob });
    // In JavaScript objects, names that are integers come first.
    const top = Object.entries(scored.top_logprobs[i]).toSorted(([, a], [, b]) => b - a);
    return { ...read([name, scored.token_logprobs[i]]), top: top.map(read) };
  });
  return { ...common(choice, usage), text: choice?.text ?? "", tokens };
}

const common = (choice, usage) => ({
  promptIds: choice?.prompt_token_ids,
  finish: choice?.finish_reason,
  usage,
});

function parseName(name) {
  const isPart = name.startsWith(BYTES) && name.includes("\\x");
  return isPart ? { name: name.slice(BYTES.length), text: null } : { name, text: name };
}

/** Read an event of /v1/chat/completions. */
export function fromChat({ choices: [choice], usage }) {
  const tokens = (choice?.logprobs?.content ?? []).map((entry) => ({
    ...readToken(entry),
    top: entry.top_logprobs.map(readToken),
  }));
  const { content: text = "", reasoning_content: reasoning, tool_calls: calls } =
    choice?.delta ?? {};
  return { ...common(choice, usage), text, reasoning, calls, tokens };
}

/** Read a scored token. `bytes` is null for a token that adds nothing to the text. */
function readToken({ token, token_id: id, logprob, bytes }) {
  if (bytes === null || !token.includes("\ufffd"))
    return { id, name: token, text: bytes === null ? "" : token, logprob };
  const name = bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  return { id, name, text: null, logprob };
}
