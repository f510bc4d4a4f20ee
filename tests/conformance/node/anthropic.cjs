// Anthropic's package for Node: node anthropic.cjs ENVIRONMENT URL MODEL. Prints its number of calls.
const assert = require("node:assert");
const { createRequire } = require("node:module");

const [environment, baseURL, model] = process.argv.slice(2);
const Anthropic = createRequire(`${environment}/`)("@anthropic-ai/sdk");
let calls = 0;
const count = (...given) => { calls += 1; return fetch(...given); };
const schema = { type: "object", properties: { day: { enum: ["mon", "tue"] } }, required: ["day"], additionalProperties: false };

async function main() {
  const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0, fetch: count });
  const messages = [{ role: "user", content: "def" }];
  const tools = [{ name: "weather", input_schema: schema }];
  const { input_tokens } = await client.messages.countTokens({ model, messages, tools });
  const body = { model, messages, tools, max_tokens: 200, temperature: 0, tool_choice: { type: "any", disable_parallel_tool_use: true }, stop_sequences: ["\u2603"] };
  const whole = await client.messages.create(body);
  assert.equal(whole.usage.input_tokens + whole.usage.cache_read_input_tokens, input_tokens);
  const final = await client.messages.stream(body).finalMessage();
  assert.deepEqual(final.content[0].input, whole.content[0].input);
  assert.equal(final.stop_reason, "tool_use");
  const [call] = final.content;
  const result = { type: "tool_result", tool_use_id: call.id, content: "well" };
  const turns = [...messages, { role: "assistant", content: [call] }, { role: "user", content: [result] }];
  let text = "";
  const answer = client.messages.stream({ ...body, messages: turns, tool_choice: { type: "none" }, max_tokens: 8 });
  answer.on("text", (piece) => { text += piece; });
  const { content } = await answer.finalMessage();
  assert.equal(content.map((block) => block.text).join(""), text);
  await assert.rejects(client.messages.create({ ...body, model: "another" }), Anthropic.NotFoundError);
}

main().then(() => console.log(calls), (error) => { console.error(error); process.exit(1); });
