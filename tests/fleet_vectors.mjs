// node fleet_vectors.mjs WIRE.mjs VECTORS.json: does this wire read and write the same bytes as fedbraid's own?
import assert from "node:assert/strict";
import { createPublicKey } from "node:crypto";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const wire = await import(pathToFileURL(process.argv[2]));
const vectors = JSON.parse(readFileSync(process.argv[3]));
const key = createPublicKey(vectors.operator_public), now = 1000 * vectors.now, accepted = new Map();
const pattern = (size) => Buffer.from({ length: size }).map((_, i) => i % 251);
const read = (hex) => wire.readOrder(Buffer.from(hex, "hex"), key, "node-7", accepted, now);

for (const expected of vectors.orders) {
  const order = read(expected.message);
  for (const field of ["run", "job", "node", "kind", "serial"]) assert.equal(order[field], expected[field]);
  assert.equal(order.deadline, 1000 * expected.deadline);
  assert.equal(order.body.toString("hex"), expected.body);
  assert.deepEqual(order.model && [order.model.name, order.model.digest, order.model.size], expected.model);
  assert.throws(() => read(expected.message), /delivered before/);
}
for (const { message, reason } of vectors.refused) assert.throws(() => read(message), new RegExp(reason));
for (const model of vectors.models) {
  assert.equal(wire.digest(pattern(model.size)), model.digest);
  assert.deepEqual(wire.modelRequests(model), model.requests);
}
for (const { size, job, chunks } of vectors.answers) {
  assert.deepEqual(wire.answerChunks(job, pattern(size)).map(([headers, part]) => [headers, part.length]), chunks);
}
for (const { frame, layout, vector } of vectors.frames) {
  const bytes = Buffer.from(frame, "hex");
  assert.deepEqual([...wire.readFrame(bytes).vector], vector);
  assert.deepEqual(wire.packFrame(Float32Array.from(vector), Buffer.from(layout, "hex")), bytes);
  bytes[20] ^= 1;
  assert.throws(() => wire.readFrame(bytes), /not a frame/);
}
for (const { head, upload, message } of vectors.answer_bodies) {
  assert.equal(wire.packAnswer(head, Buffer.from(upload, "hex")).toString("hex"), message);
}
console.log("equal");
