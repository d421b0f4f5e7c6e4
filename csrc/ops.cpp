#include <torch/library.h>

// All schemas, and nothing else. The op NAME has its kernels and their arguments in
// csrc/ops/NAME.h, checks and registration in csrc/ops/NAME.cpp, and implementations in
// csrc/cpu/NAME.cpp and csrc/cuda/NAME.cu, or in the files of a kernel that it shares. Its fake is
// in python/cuseq/_base/fakes.py. CONTRIBUTING.md explains how to add one.
TORCH_LIBRARY(cuseq, m) {
  const std::vector<at::Tag> pure = {at::Tag::pt2_compliant_tag};

  // csrc/ops/cu_seqlens.cpp
  m.def("cu_seqlens(Tensor lengths) -> Tensor", pure);
  m.def("max_seqlen(Tensor lengths) -> Tensor", pure);
  m.def("max_seqlen_sync(Tensor lengths) -> SymInt", pure);
  m.def("last_token_indices(Tensor lengths) -> Tensor", pure);
  m.def(
      "layout_metadata(Tensor source, SymInt total_tokens, SymInt max_seqs, bool from_cu_seqlens, "
      "Tensor? num_seqs=None) -> (Tensor lengths, Tensor cu_seqlens, Tensor host_meta)",
      pure);
  m.def(
      "segment_metadata(Tensor lengths, SymInt total_tokens, SymInt max_seqs, int "
      "segment_multiple) -> (Tensor lengths, Tensor cu_seqlens, Tensor host_meta, Tensor "
      "segment_lengths, Tensor cu_seqlens_padded, Tensor segment_meta)",
      pure);

  // csrc/ops/token_metadata.cpp
  m.def("position_ids(Tensor lengths, SymInt total_tokens) -> Tensor", pure);
  m.def("seq_ids(Tensor lengths, SymInt total_tokens) -> Tensor", pure);
  m.def(
      "token_metadata(Tensor cu_seqlens, SymInt total_tokens, Tensor? cu_seqlens_padded=None) -> "
      "(Tensor position_ids, Tensor seq_ids, Tensor is_pad)",
      pure);

  // csrc/ops/NAME.cpp
  m.def("lengths_from_padding_mask(Tensor mask, str kind=\"nonzero\") -> Tensor", pure);
  m.def(
      "segment_rows(Tensor cu_seqlens, Tensor cu_seqlens_padded, SymInt total_tokens) -> "
      "(Tensor places, Tensor ranks)",
      pure);
  m.def(
      "mask_rows(Tensor mask, Tensor cu_seqlens, SymInt total_tokens, str kind=\"nonzero\") -> "
      "(Tensor slots, Tensor tokens, Tensor position_ids, Tensor seq_ids, Tensor is_pad)",
      pure);
  m.def(
      "cu_seqlens_from_position_ids(Tensor position_ids, SymInt? max_seqs=None, int? plane=None) "
      "-> (Tensor cu_seqlens, Tensor num_seqs)",
      pure);
  m.def(
      "mask_boundary_labels(Tensor labels, Tensor cu_seqlens, int shift=0, "
      "int ignore_index=-100, Tensor? cu_seqlens_padded=None) -> Tensor",
      pure);

  // csrc/ops/gather_rows.cpp. Row r of an output is slot index[r] of its tensor; slot s was copied
  // to row inverse[s]. In both, -1 means none.
  m.def(
      "gather_rows(Tensor[] tensors, Tensor index, Tensor inverse, SymInt[] rows, int leading, "
      "Scalar[] fill) -> Tensor[]",
      pure);

  // csrc/ops/masks.cpp. Ranges are the keys [first, end) of each token, [2, total_tokens].
  const std::string rule =
      "Tensor source, SymInt total_tokens, bool from_cu_seqlens=False, bool causal=True, "
      "int? window=None, Tensor? spans=None, Tensor? cu_seqlens_padded=None";
  const std::string dense =
      rule + ", SymInt? row_length=None, ScalarType? dtype=None, bool finite=False) -> Tensor";
  const std::string blocks =
      ", SymInt? row_length=None, int query_block=128, int key_block=128) -> Tensor[]";
  m.def(("mask_ranges(" + rule + ") -> Tensor").c_str(), pure);
  m.def(("dense_mask(" + dense).c_str(), pure);
  m.def(("block_mask(Tensor ranges" + blocks).c_str(), pure);

  // csrc/attention/varlen_attention.cpp. host_meta is read on the host when the op runs, so
  // replaying the op in a graph would reuse stale lengths. rank_meta is read too: the op then
  // exchanges rows with the other ranks of rank_group, and far_rows holds those it received, for
  // the backward; otherwise far_rows is undefined.
  const std::vector<at::Tag> reads_host = {at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  m.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, "
      "Tensor? host_meta=None, bool causal=True, int? window=None, float? scale=None, "
      "SymInt? max_seqlen_bound=None, Tensor? spans=None, Tensor? cu_seqlens_padded=None, "
      "float? softcap=None, str backend=\"auto\", Tensor? rank_rows=None, "
      "Tensor? rank_meta=None, str rank_group=\"\", Tensor? tree_rows=None, "
      "Tensor? tree_meta=None) -> (Tensor out, Tensor logsumexp, Tensor far_rows)",
      reads_host);
  m.def(
      "varlen_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor logsumexp, Tensor? far_rows, Tensor cu_seqlens, Tensor? host_meta=None, "
      "bool causal=True, int? window=None, float? scale=None, SymInt? max_seqlen_bound=None, "
      "Tensor? spans=None, Tensor? cu_seqlens_padded=None, float? softcap=None, "
      "str backend=\"auto\", Tensor? rank_rows=None, Tensor? rank_meta=None, "
      "str rank_group=\"\", Tensor? tree_rows=None, Tensor? tree_meta=None) -> "
      "(Tensor grad_q, Tensor grad_k, Tensor grad_v)",
      reads_host);

  // csrc/attention/backends/packages.cpp calls these inside of varlen_attention. Python registers
  // their kernels, which packages launch: python/cuseq/attention/fa3.py and fa4.py. They return why
  // they refuse a call, or an empty string; one that must run raises instead.
  const std::string outputs = "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) logsumexp";
  const std::string gradients =
      "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor logsumexp, Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v";
  const std::string sequences =
      ", Tensor cu_seqlens_q, Tensor cu_seqlens_k, int longest_q, int longest_k, float scale, "
      "bool causal, int? window_left, int? window_right, bool must_run) -> str";
  m.def(("fa4_forward(" + outputs + sequences).c_str());
  m.def(("fa4_backward(" + gradients + sequences).c_str());
  m.def(("fa3_forward(" + outputs + sequences).c_str());
  m.def(("fa3_backward(" + gradients + sequences).c_str());

  // csrc/ops/apply_rope.cpp and csrc/ops/apply_qk_norm_rope.cpp, which also read host_meta. During
  // a capture by the user they ignore it and read the offsets on the device.
  const auto def_rope = [&](const std::string& name_and_arguments, const std::string& returns) {
    const std::string options =
        "Tensor cos, Tensor sin, Tensor? cu_seqlens=None, Tensor? host_meta=None, "
        "Tensor? position_ids=None, SymInt offset=0, str table=\"position\", "
        "str qkv_format=\"thd\", bool interleaved=False, int? rotary_dim=None, "
        "int[]? mrope_section=None, bool mrope_interleaved=False, int cp_size=1, int cp_rank=0, "
        "bool inverse=False";
    m.def((name_and_arguments + ", " + options + ") -> " + returns).c_str(), reads_host);
  };
  def_rope("apply_rope(Tensor[] tensors", "Tensor[]");
  def_rope("apply_rope_(Tensor(a!)[] tensors", "()");
  def_rope("apply_qk_norm_rope(Tensor[] tensors, Tensor[] weights, float eps, float weight_offset",
           "(Tensor[] out, Tensor[] rstd)");
  def_rope(
      "apply_qk_norm_rope_(Tensor(a!)[] tensors, Tensor[] weights, float eps, float weight_offset",
      "()");
  def_rope(
      "apply_qk_norm_rope_backward(Tensor[] grads, Tensor[] tensors, Tensor[] weights, "
      "Tensor[] rstd, float weight_offset, bool weight_grads",
      "(Tensor[] grad_tensors, Tensor[] grad_weights)");

  // csrc/ops/causal_conv1d.cpp. The forward returns the output and, if asked for, the final states;
  // the backward the gradients of x, of weight and bias, and of the initial states, where they are.
  const std::string conv =
      "Tensor x, Tensor weight, Tensor? bias=None, Tensor? cu_seqlens=None, "
      "Tensor? cu_seqlens_padded=None, Tensor? seq_idx=None, Tensor? initial_states=None, "
      "bool silu=False";
  m.def(("causal_conv1d(" + conv + ", bool final_states=False) -> Tensor[]").c_str(), pure);
  m.def(("causal_conv1d_backward(Tensor grad_out, " + conv +
         ", Tensor? grad_final_states=None, bool weight_grads=True) -> Tensor[]")
            .c_str(),
        pure);

  // csrc/ops/segment_reduce.cpp. `kind` is "sum", "mean", "max" or "last"; `which` is the token of
  // each maximum, and empty for other kinds. Offsets may be followed by unused ones: host_meta, or
  // the rows of grad_out, say how many sequences there are.
  const std::string segments = "Tensor cu_seqlens, str kind, Tensor? cu_seqlens_padded=None";
  m.def(("segment_reduce(Tensor values, " + segments +
         ", Tensor? host_meta=None) -> (Tensor out, Tensor which)")
            .c_str(),
        reads_host);
  m.def(("segment_reduce_backward(Tensor grad_out, Tensor which, ScalarType dtype, "
         "SymInt total_tokens, " +
         segments + ") -> Tensor")
            .c_str(),
        pure);

  // csrc/ops/token_logprobs.cpp. `mean` is that of the logits, weighted with their probabilities.
  const std::string head =
      "Tensor hidden, Tensor weight, Tensor targets, Tensor? bias=None, float temperature=1.0, "
      "int? chunk_size=None, bool entropy=False, float scale=1.0, float? softcap=None";
  m.def(("token_logprobs(" + head +
         ") -> (Tensor logprobs, Tensor entropies, Tensor logsumexp, Tensor mean)")
            .c_str(),
        pure);
  m.def(("token_logprobs_backward(Tensor? grad_logprobs, Tensor? grad_entropies, "
         "Tensor logsumexp, Tensor mean, " +
         head + ") -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)")
            .c_str(),
        pure);

  // csrc/cache/cached_ops.cpp
  m.def("cached_cu_seqlens(Tensor lengths) -> Tensor", pure);
  m.def("cached_position_ids(Tensor lengths, SymInt total_tokens) -> Tensor", pure);
  m.def("cached_seq_ids(Tensor lengths, SymInt total_tokens) -> Tensor", pure);
  m.def(("cached_mask_ranges(" + rule + ") -> Tensor").c_str(), pure);
  m.def(("cached_dense_mask(" + dense).c_str(), pure);
  m.def(("cached_block_mask(" + rule + blocks).c_str(), pure);
}
