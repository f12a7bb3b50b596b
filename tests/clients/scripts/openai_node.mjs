// The npm package openai against a server: openai_node.mjs URL.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello \u{1F469}\u200D\u{1F52C}" }];
const fixed = { model: "tiny", messages, temperature: 0, max_tokens: 12 };

const models = await client.models.list();
assert.equal(models.data[0].id, "tiny");

const whole = await client.chat.completions.create(fixed);
assert.equal(whole.usage.completion_tokens, 12);
assert.equal(whole.choices[0].finish_reason, "length");

let text = "", usage = null;
for await (const chunk of await client.chat.completions.create({
  ...fixed, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, 12);

// The helper that gathers a stream, and its events.
const runner = client.chat.completions.stream({ ...fixed, n: 2, seed: 3, temperature: 1 });
const gathered = await runner.finalChatCompletion();
assert.equal(gathered.choices.length, 2);
assert.ok(gathered.choices.every((choice) => choice.finish_reason));

const schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false };
const parsed = await client.chat.completions.parse({
  ...fixed, max_tokens: 200, response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
});
assert.ok(["Paris", "Rome"].includes(parsed.choices[0].message.parsed.city));

const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
const calling = client.chat.completions.stream({ ...fixed, max_tokens: 300, tools, tool_choice: "required" });
const called = await calling.finalChatCompletion();
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.ok(["Paris", "Rome"].includes(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city));

const completion = await client.completions.create({ model: "tiny", prompt: ["a", "b"], max_tokens: 3, logprobs: 1, echo: true });
assert.equal(completion.choices.length, 2);
assert.ok(completion.choices[0].logprobs.token_logprobs.length >= 4);

// A stream that is broken off by its reader.
const stream = await client.chat.completions.create({ ...fixed, max_tokens: 3000, stream: true });
for await (const chunk of stream) { assert.ok(chunk.id); break; }

await assert.rejects(client.chat.completions.create({ ...fixed, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...fixed, temperature: -1 }), OpenAI.BadRequestError);

const response = await client.responses.create({ model: "tiny", input: "Hello", max_output_tokens: 12, temperature: 0 });
assert.equal(response.usage.output_tokens, 12);
let delta = "";
for await (const event of await client.responses.create({ model: "tiny", input: "Hello", max_output_tokens: 12, temperature: 0, stream: true })) {
  if (event.type === "response.output_text.delta") delta += event.delta;
}
assert.equal(delta, response.output_text);
console.log("ok");
