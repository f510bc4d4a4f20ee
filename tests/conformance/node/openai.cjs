// Responses by OpenAI's package for Node, or by the AI SDK: node openai.cjs ENVIRONMENT URL MODEL PACKAGE.
// Prints its number of calls.
const assert = require("node:assert");
const { createRequire } = require("node:module");

const [environment, url, model, name] = process.argv.slice(2);
const load = createRequire(`${environment}/`);
const OpenAI = load("openai");
const { zodTextFormat } = load("openai/helpers/zod");
const { createOpenAI } = load("@ai-sdk/openai");
const { Output, generateText, streamText, tool } = load("ai");
const { z } = load("zod");

let calls = 0;
const count = (...given) => { calls += 1; return fetch(...given); };
const options = { baseURL: `${url}/v1`, apiKey: "none", fetch: count };
const Day = z.object({ day: z.enum(["mon", "tue"]) });
const parameters = { type: "object", properties: { day: { enum: ["mon", "tue"] } }, required: ["day"], additionalProperties: false };

async function useOpenAI() {
  const client = new OpenAI({ ...options, maxRetries: 0 });
  const body = { model, input: "def", temperature: 0, max_output_tokens: 8 };
  const whole = await client.responses.create(body);
  let text = "";
  const stream = client.responses.stream(body);
  stream.on("response.output_text.delta", ({ delta }) => { text += delta; });
  const final = await stream.finalResponse();
  assert.equal(final.output_text, text);
  assert.equal(final.output_text, whole.output_text);
  assert.equal((await client.responses.retrieve(final.id)).output_text, text);
  const next = await client.responses.create({ ...body, previous_response_id: whole.id });
  const again = await client.responses.create({ ...body, input: [{ role: "user", content: "def" }, ...whole.output, { role: "user", content: "def" }] });
  assert.equal(next.output_text, again.output_text);
  const typed = await client.responses.parse({ model, input: "def", text: { format: zodTextFormat(Day, "day") } });
  assert.ok(Day.safeParse(typed.output_parsed).success);
  const tools = [{ type: "function", name: "weather", parameters, strict: true }];
  const forced = { model, input: "def", temperature: 0, tools, tool_choice: "required", parallel_tool_calls: false };
  const [call] = (await client.responses.create(forced)).output;
  const streamed = await client.responses.stream(forced).finalResponse();
  assert.equal(streamed.output[0].arguments, call.arguments);
  const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
  const answer = await client.responses.create({ ...body, input: [{ role: "user", content: "def" }, call, result], tools });
  assert.ok(answer.output.length);
  await assert.rejects(client.responses.create({ ...body, model: "another" }), OpenAI.NotFoundError);
}

async function useAISDK() {
  const settings = { model: createOpenAI(options)(model), prompt: "def", temperature: 0, maxRetries: 0 };
  const { text } = await generateText({ ...settings, maxOutputTokens: 8 });
  const stream = streamText({ ...settings, maxOutputTokens: 8 });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  assert.equal(streamed, text);
  assert.equal(await stream.finishReason, "length");
  const { output } = await generateText({ ...settings, output: Output.object({ schema: Day }) });
  assert.ok(Day.safeParse(output).success);
  const weather = tool({ inputSchema: Day, execute: ({ day }) => `rain on ${day}` });
  const forced = await generateText({ ...settings, tools: { weather }, toolChoice: "required", providerOptions: { openai: { parallelToolCalls: false } } });
  assert.match(forced.toolResults[0].output, /^rain on (mon|tue)$/);
  const messages = [{ role: "user", content: "def" }, ...forced.response.messages];
  const after = await generateText({ ...settings, prompt: undefined, messages, maxOutputTokens: 8, tools: { weather } });
  assert.equal(after.finishReason, "length");
}

const use = { openai: useOpenAI, "@ai-sdk/openai": useAISDK }[name];
use().then(() => console.log(calls), (error) => { console.error(error); process.exit(1); });
