-- What wrk sends: the requests of a file, as load.cc reads it, in turn. Prints one line of JSON at the end.
local requests = {}
local at = 0

function init(args)
  local file = assert(io.open(args[1], "rb"))
  local sizes = {}
  for i = 1, tonumber(file:read("*l")) do
    sizes[i] = tonumber(file:read("*l"):match("^%d+"))
  end
  for i, size in ipairs(sizes) do
    requests[i] = file:read(size)
  end
  file:close()
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency, _)
  local errors = summary.errors
  print(string.format(
    '{"requests": %d, "seconds": %.6f, "p50": %.9f, "p99": %.9f, "all": %d, "errors": %d}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    summary.requests, errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
