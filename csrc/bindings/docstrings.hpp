// SPDX-License-Identifier: BSD-3-Clause
//
// The texts of the module, NumPy style, apart from the glue.
#pragma once

namespace gpumemx::bindings {

inline constexpr char kModuleDoc[] =
    "The compiled part of gpumemx. Private: the public names are those of the package gpumemx.";

inline constexpr char kParseBytesDoc[] = R"doc(
Read a size as people write it.

Parameters
----------
text : str
    A number and a unit: ``"24GiB"``, ``"1.5 GiB"``, ``"512M"``, ``"1000000"`` (bytes). k, M, G, T
    and P, with or without iB or B, are powers of 1024. Case and spaces do not matter.

Returns
-------
int
    Bytes.

Raises
------
ValueError
    The text is not a size, is negative, or has 63 bits or more.
)doc";

inline constexpr char kFormatBytesDoc[] = R"doc(
Write a size as gpumemx's reports do: ``"512 B"``, ``"1.50 GiB"``.

Parameters
----------
size : int
    Bytes, 0 or more.

Returns
-------
str
    Binary units, two decimals from KiB on.
)doc";

inline constexpr char kBuildInfoDoc[] = R"doc(
What this build is and what it was built with.

Returns
-------
dict
    * ``version``, ``compiler``, ``build_type`` : str
    * ``sanitizers`` : str or None
    * ``paranoid`` : bool, every structure is validated after every operation
    * ``cuda_driver`` : bool, whether the driver layer for real devices is in
    * ``cuda`` : str or None, the CUDA version of the headers that it was compiled against
    * ``torch_adapter`` : bool, whether an adapter to torch was built together with it
    * ``torch``, ``torch_cuda`` : str or None, the torch of the Python that was built for, and the
      CUDA of that torch
)doc";

inline constexpr char kValidateTraceDoc[] = R"doc(
Say what is wrong with a trace.

Parameters
----------
op, size, time_us : numpy.ndarray of int64, one-dimensional, C-contiguous
stream : numpy.ndarray of int16, one-dimensional, C-contiguous
slots : int
    See `Replay`.

Returns
-------
str or None
    The first mistake in one sentence with the event's index and the value; None when there is none.

Raises
------
TypeError
    An array has another type or shape (the message names it).
)doc";

inline constexpr char kReplayDoc[] = R"doc(
A recorded run, fed to the allocator over a simulated device.

Parameters
----------
op : numpy.ndarray of int64
    ``k >= 0`` allocates into slot ``k``, ``~k`` frees what slot ``k`` holds.
size : numpy.ndarray of int64
    Bytes asked for; not looked at where ``op`` frees.
stream : numpy.ndarray of int16
    Index of the stream, 0 or more; not looked at where ``op`` frees.
time_us : numpy.ndarray of int64
    Microseconds from the first event, never going back.
slots : int
    Number of slots, at most 2**24.
capacity : int or None
    What the policy may reserve in bytes, as ``set_per_process_memory_fraction`` limits it; None for
    no limit.
lag_ms : float
    How long after it was queued work of a stream completes, in milliseconds, from 0 to 3.6e6.
policy : str
    One of `policies`.
settings : dict of str to str
    By the names of `policy_settings`; the others keep their defaults.
device_bytes : int or None
    What the device has for the policy; None for no limit.
device_total_bytes : int or None
    What the device says it has: torch reserves addresses for expandable segments by it. None for
    that of an H200, or of the limits if they are higher.
record_segments : bool
    Keep what `segments` returns.

Raises
------
TypeError
    An array has another type, is not one-dimensional or not C-contiguous (the message names it).
ValueError
    The trace is inconsistent (the message names the event and the value, as `validate_trace`), or
    a limit, ``lag_ms``, the policy or a setting is out of range or unknown.

Notes
-----
Keeps references to the arrays: they must not be written to while it lives. The figures but the host
time are the same on every machine, and after n events those of a trace that ends there. Several
threads may use one object; their calls of `run` follow one another.
)doc";

inline constexpr char kRunDoc[] = R"doc(
Do some more events.

Parameters
----------
max_events : int or None
    At most so many; None for all that are left.

Returns
-------
int
    The events done, of all calls. It stays below `events_total` when a request ran out of memory,
    which ends the replay (`failed_at`).

Notes
-----
Releases the GIL.
)doc";

inline constexpr char kReportDoc[] = R"doc(
The figures of the events done so far.

Returns
-------
dict
    * ``events`` : events done
    * ``live_peak_bytes`` : highest sum of the sizes asked for; nothing can need less
    * ``reserved_peak_bytes`` : highest device memory held
    * ``driver_calls`` : dict, calls by kind, the failed ones included
    * ``driver_seconds`` : modelled time of all driver calls
    * ``driver_seconds_inline`` : of that, what an allocating or freeing thread waited for
    * ``driver_seconds_growth`` : of that, creating handles and mapping them for the first time
    * ``trace_seconds`` : from the first to the last event done
    * ``wait_seconds`` : time that requests waited for streams, which the clock went on
    * ``host_ns_per_event`` : measured time of our own code, the simulated device's included
    * ``failed_at`` : index of the event that ran out of memory, or None
    * ``retries`` : requests that were served, if at all, only after cached memory went back to the
      device; 0 under gpumemx
    * ``paths`` : dict, how often each way of serving a request was taken; of torch's policies only
      ``hits`` (free blocks that fit) and ``misses``
)doc";

inline constexpr char kSegmentsDoc[] = R"doc(
What was taken from the device and given back so far: numpy.ndarray of int64, shape (n, 4).

Rows of the event's index, the bytes (negative when given back), the address and the stream. Of
expandable segments the pages that were mapped and unmapped. Empty without ``record_segments``.
)doc";

inline constexpr char kPoliciesDoc[] = R"doc(
The policies that `Replay` knows.

Returns
-------
list of str
)doc";

inline constexpr char kPolicySettingsDoc[] = R"doc(
The names of a policy's settings.

Parameters
----------
policy : str
    One of `policies`.

Returns
-------
list of str
)doc";

inline constexpr char kGatherSettingsDoc[] = R"doc(
The settings that all sources together give, without installing anything.

Parameters
----------
conf : str
    The text of GPUMEMX_CONF. torch's variables are read from the environment.
arguments : dict of str to str
    Those of ``install_allocator()``.

Returns
-------
list of dict
    ``key``, ``value``, ``source`` and ``note``, all str; torch's own keys last.

Raises
------
ValueError
    The first mistake, in one sentence that begins with its source.
)doc";

inline constexpr char kUnknownEnvironmentDoc[] = R"doc(
One sentence for each name that starts with GPUMEMX_ and means nothing.

Parameters
----------
names : list of str
    Names of environment variables.

Returns
-------
list of str
)doc";

inline constexpr char kProbeDeviceDoc[] = R"doc(
Start CUDA on a device and see what gpumemx can use there.

Parameters
----------
device : int
    Its ordinal.

Returns
-------
dict
    * ``virtual_memory`` : bool, a real create, map and set_access worked
    * ``exportable`` : bool, handles can be exported as file descriptors
    * ``granularity``, ``free``, ``total`` : int, bytes

Raises
------
RuntimeError
    There is no CUDA driver or no such device, or this build is without CUDA.

Notes
-----
May take a second: makes the device's primary context, which is gone again on return unless
somebody else uses it.
)doc";

inline constexpr char kAnalyzeSnapshotDoc[] = R"doc(
Say what a memory snapshot of PyTorch tells.

Parameters
----------
path : str
    A file that ``torch.cuda.memory._dump_snapshot(path)`` wrote, of any torch since 2.0, or a pickle
    of what ``torch.cuda.memory.memory_snapshot()`` returns. Nothing in it is imported or called.
progress_callback : callable, optional
    Called as ``progress_callback(done, total)`` in bytes of the file. What it raises ends the
    reading and comes out here.

Returns
-------
dict
    ``file``, ``schema`` (what the file tells, in words) and ``devices``: a list with a dict for each
    device that the file says anything of. Sizes are in bytes; those of blocks are what the program
    asked for.

    * ``device``, ``events`` : int
    * ``recording`` : ``state`` ("on", "off" or "state only"), ``overflowed`` (the oldest events were
      lost), ``baseline_bytes`` (live before the first event; baseline + allocations - frees is what
      is live), ``unknown_frees`` (frees of what no event of the file allocated)
    * ``live_now``, ``reserved_now`` : when the snapshot was taken; None where the file does not tell
    * ``peak`` : ``event`` (the first after which the most was live; -1 is before the first),
      ``time_us`` (since 1970, or None), ``live``, ``reserved``
    * ``alive_at_peak`` : ``by_site`` and ``by_category``, the most bytes first, and
      ``by_size_class``, by size
    * ``fragmentation`` : at the peak. ``reserved``, ``live``, ``largest_free`` (one piece),
      ``free_in_busy_segments`` (what empty_cache() would not give back), ``lonely_segments`` (held
      by one block of at most an eighth of their size; those that waste most first). Zeros where the
      file has no segments
    * ``ooms`` : each out-of-memory event and, in words, what it meant
    * ``series`` : at most 4,000 points; ``live`` and ``reserved`` are the highest from ``time_us``
      to the next. Without recorded times, ``time_us`` is the number of the event

Raises
------
ValueError
    The file cannot be read or is no snapshot; the text says what is wrong, where, and what to do.

Notes
-----
Releases the GIL. Reads the file in pieces.
)doc";

inline constexpr char kSnapshotTracesDoc[] = R"doc(
Turn the history of a memory snapshot into traces for `Replay`, one a device that has events.

What was live before the first event is allocated first, all at time 0.

Parameters
----------
path : str
    See `analyze_snapshot`.

Returns
-------
list of dict
    ``device`` : int; ``op``, ``size``, ``time_us`` : numpy.ndarray of int64; ``stream`` :
    numpy.ndarray of int16; ``slots`` : int.

Raises
------
ValueError
    The file cannot be read, is no snapshot, or has no history; the text says what to do.

Notes
-----
Releases the GIL. Where times were not recorded, events are 100 microseconds apart.
)doc";

}  // namespace gpumemx::bindings
