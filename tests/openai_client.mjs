// The official openai client against a running server; docs/serve.md says how. Prints a line a check, exits 1 if any fails.
//
//   node openai_client.mjs http://127.0.0.1:PORT MODEL [API_KEY]

import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, model, apiKey = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey, maxRetries: 0 });
let failed = 0;
async function check(name, f) {
  try {
    await f();
    console.log(`ok    ${name}`);
  } catch (error) {
    failed++;
    console.log(`FAIL  ${name}: ${error.message}`);
  }
}

const completion = { model, prompt: ["3+4:", "12-5:"], n: 2, max_tokens: 12, seed: 7, temperature: 0.9, top_p: 0.95, logprobs: 0 };

await check("models.list", async () => {
  const models = await client.models.list();
  assert.equal(models.data[0].id, model);
});

await check("completions, streamed as whole", async () => {
  const whole = await client.completions.create(completion);
  assert.equal(whole.choices.length, 4);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  const again = await client.completions.create(completion);
  assert.deepEqual(again.choices, whole.choices, "one seed, one answer");
  const texts = ["", "", "", ""], logprobs = [[], [], [], []], reasons = [];
  let usage;
  for await (const part of await client.completions.create({ ...completion, stream: true, stream_options: { include_usage: true } })) {
    if (part.usage) usage = part.usage;
    for (const c of part.choices) {
      texts[c.index] += c.text;
      logprobs[c.index].push(...(c.logprobs?.token_logprobs ?? []));
      if (c.finish_reason) reasons[c.index] = c.finish_reason;
    }
  }
  assert.deepEqual(usage, whole.usage);
  for (const c of whole.choices) {
    assert.equal(texts[c.index], c.text);
    assert.equal(reasons[c.index], c.finish_reason);
    assert.deepEqual(logprobs[c.index], c.logprobs.token_logprobs);
  }
});

await check("stop", async () => {
  const free = (await client.completions.create({ ...completion, n: 1, prompt: "3+4:" })).choices[0].text;
  if (free.length < 3) return;
  const stop = free[2];
  const cut = (await client.completions.create({ ...completion, n: 1, prompt: "3+4:", stop: [stop] })).choices[0];
  assert.equal(cut.text, free.slice(0, free.indexOf(stop)));
  assert.equal(cut.finish_reason, "stop");
});

await check("chat, streamed as whole", async () => {
  const chat = { model, messages: [{ role: "system", content: "Be brief." }, { role: "user", content: "3+4?" }], max_completion_tokens: 16, seed: 1, logprobs: true };
  const whole = await client.chat.completions.create(chat);
  let text = "";
  for await (const part of await client.chat.completions.create({ ...chat, stream: true })) text += part.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(whole.choices[0].logprobs.content.length, whole.usage.completion_tokens);
  const runner = client.chat.completions.stream(chat);  // the client's own assembly of the parts
  assert.equal((await runner.finalChatCompletion()).choices[0].message.content, whole.choices[0].message.content);
});

await check("errors have the client's classes", async () => {
  await assert.rejects(client.completions.create({ ...completion, temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(client.completions.create({ ...completion, model: "gpt" }), OpenAI.NotFoundError);
  await assert.rejects(client.completions.create({ ...completion, max_tokens: 1000000 }), OpenAI.BadRequestError);
  if (apiKey !== "none") await assert.rejects(new OpenAI({ baseURL: `${base}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
});

await check("a stream that is left", async () => {
  const stream = await client.completions.create({ ...completion, max_tokens: 200, stream: true });
  for await (const part of stream) break;
  stream.controller.abort();
});

process.exit(failed ? 1 : 0);
