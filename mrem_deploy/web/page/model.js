// Everything that is loaded: settings, tokenizer, WebAssembly and the ONNX model, all from this folder.
import * as ort from "./vendor/ort.js";
import { Encoder } from "./tokens.js";

export class Failure extends Error {}

async function fetched(path, told = () => {}) {
  let response;
  try {
    response = await fetch(new URL(path, import.meta.url));
  } catch (error) {
    throw new Failure(`${path} could not be fetched: ${error.message}`);
  }
  if (!response.ok) throw new Failure(`${path} is missing on the server (status ${response.status})`);
  const parts = [];
  for (let reader = response.body.getReader(), part; !(part = await reader.read()).done; ) {
    parts.push(part.value);
    told(part.value.length);
  }
  return new Blob(parts);
}

const json = async (path) => JSON.parse(await (await fetched(path)).text());

// Stored compressed, because a plain file server compresses nothing; some servers unpack it on the way.
async function unpacked(blob) {
  const start = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
  if (start[0] !== 0x1f || start[1] !== 0x8b) return blob.arrayBuffer();
  return new Response(blob.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

export class Model {
  static async load(told) {
    const started = performance.now();
    const settings = await json("site.json");
    told(settings, 0);
    let bytes = 0;
    const count = (more) => told(settings, (bytes += more) / (settings.file_bytes + settings.runtime_bytes));
    const [weights, runtime, tokenizer, config] = await Promise.all([
      fetched(settings.file, count),
      fetched("vendor/ort-wasm.bin", count),
      json("model/tokenizer.json"),
      json("model/tokenizer_config.json"),
    ]);
    const arrived = performance.now();
    ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
    ort.env.wasm.wasmBinary = await unpacked(runtime);
    ort.env.logLevel = "error";
    const session = await ort.InferenceSession.create(new Uint8Array(await weights.arrayBuffer()), { executionProviders: ["wasm"] });
    const encoder = new Encoder(tokenizer, config, settings.max_length);
    const ready = performance.now();
    return new Model(settings, session, encoder, { fetch: arrived - started, prepare: ready - arrived, bytes });
  }

  constructor(settings, session, encoder, load) {
    Object.assign(this, { settings, session, encoder, load });
  }

  // { tokens, total, values, shape, ms }: the first output for one text, or one pair.
  async run(text, pair = null) {
    const { tokens, types, ids, total } = this.encoder.encode(text, pair);
    const shape = [1, ids.length];
    const tensor = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
    const given = { input_ids: tensor(ids), attention_mask: tensor(ids.map(() => 1)), token_type_ids: tensor(types) };
    const inputs = Object.fromEntries(this.session.inputNames.map((name) => [name, given[name]]));
    const started = performance.now();
    const outputs = await this.session.run(inputs);
    const ms = performance.now() - started;
    const output = outputs[this.session.outputNames[0]];
    return { tokens, total, values: [...output.data], shape: output.dims, ms };
  }
}
