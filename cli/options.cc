#include "cli/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <sstream>
#include <type_traits>

// A malformed file can reach the parser's assertions ("[" before a NUL byte does): they are errors of the file, like all others.
namespace lockstep {
struct TomlAssertion {};
}  // namespace lockstep
#define TOML_ASSERT(condition)                           \
  do {                                                   \
    if (!(condition)) throw ::lockstep::TomlAssertion(); \
  } while (false)
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wterminate"  // in functions that may not throw the assertion ends the process, as any does
#endif
#include <toml++/toml.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include "cli/names.h"
#include "io/file.h"

namespace lockstep {

namespace {

constexpr double kMaxInteger = 9007199254740992.0;  // 2^53: every integer below is a double, so ranges may be doubles
constexpr double kMaxReal = 1e30;
constexpr double kMaxSteps = 1e9;         // weights count their versions in 32 bits
constexpr double kMaxAtOnce = 1e6;        // prompts or samples that are held in memory together
constexpr double kMaxTokens = 16777216;   // the longest context of a model
constexpr double kMaxRanks = 65536;
constexpr int64_t kMaxStepSamples = 16777216;
constexpr float kMinTemperature = 1e-6f;

// clang-format off
#define FIELD(member) [](RunConfig& c) -> auto& { return c.member; }
// clang-format on

template <auto Get>
constexpr Choice choice(std::span<const std::string_view> words) {
  return {words, [](const RunConfig& c) { return static_cast<int>(Get(const_cast<RunConfig&>(c))); },
          [](RunConfig& c, int v) {
            auto& field = Get(c);
            field = static_cast<std::remove_reference_t<decltype(field)>>(v);
          }};
}

// In the order of their enums.
constexpr std::string_view kNumericsWords[] = {"f32", "bf16", "fp8", "fp4"};
constexpr std::string_view kAdvantageWords[] = {"grpo", "dr_grpo", "rloo", "batch_std", "reinforce_pp", "reinforce_pp_baseline"};
constexpr std::string_view kAggregationWords[] = {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                                                  "seq_mean_token_sum_norm", "token_sum"};
constexpr std::string_view kKlWords[] = {"none", "k1", "k2", "k3"};
constexpr std::string_view kSamplerNumericsWords[] = {"same", "f32", "bf16", "fp8", "fp4"};
constexpr std::string_view kDeviceWords[] = {"cpu", "gpu"};
constexpr std::string_view kTransportWords[] = {"auto", "host", "device"};
constexpr std::string_view kTisWords[] = {"none", "token", "sequence"};
constexpr std::string_view kPartialWords[] = {"drop", "keep"};
constexpr std::string_view kOrderWords[] = {"given", "longest"};
constexpr std::string_view kReplayWords[] = {"none", "routing", "routing+index"};
constexpr std::string_view kScheduleWords[] = {"constant", "cosine"};

const std::vector<Setting>& rows() {
  static const std::vector<Setting> table = {
      {"device", choice<FIELD(model.device)>(kDeviceWords), "", "cpu", 0, 0,
       "Where the model runs: every rank's weights, state, sampling and training. gpu: one GPU a rank, for which the program must have been built (docs/gpu.md); "
       "otherwise its kernels run on the host, one thread after the other, for tests."},
      {"run.dir", +FIELD(run.dir), "path", "", 0, 0,
       "Where everything the run produces goes: resolved config, metrics, rollouts, checkpoints. Made if missing; a directory "
       "that holds a run is refused without --resume."},
      {"run.seed", +FIELD(run.seed), "", "0", 0, kMaxInteger,
       "Seeds initial weights, prompt order and sampling. Same config, same seed: same bits."},
      {"run.threads", +FIELD(run.threads), "threads", "0", 0, 1024,
       "CPU threads of each rank; 0 means one a core, which the ranks of a machine divide. Results do not depend on it."},
      {"run.steps", +FIELD(run.steps), "steps", "100", 0, kMaxSteps,
       "Rollouts (each with its optimizer steps) until the run ends. Raise it to go on with --resume."},
      {"run.checkpoint_every", +FIELD(run.checkpoint_every), "steps", "50", 0, kMaxInteger,
       "Steps between checkpoints; 0 keeps only the one written at the end. Lower it when losing work costs more than the disk."},
      {"run.keep_checkpoints", +FIELD(run.keep_checkpoints), "", "2", 1, kMaxInteger,
       "Newest checkpoints that are kept; older ones are deleted, so copy one that you want to keep."},
      {"run.eval_every", +FIELD(run.eval_every), "steps", "0", 0, kMaxInteger,
       "Steps between evaluations on task.eval_file, step 0 included; 0 evaluates never. Needs task.eval_file."},
      {"run.save_rollouts", +FIELD(run.save_rollouts), "", "true", 0, 0,
       "Write every sample of every step, with tokens and log-probs, into the run directory."},

      {"parallel.tp", +FIELD(parallel.tp), "ranks", "1", 1, kMaxRanks,
       "Trainer: ranks that share each layer's heads and the vocabulary. Divides the model's o_groups."},
      {"parallel.pp", +FIELD(parallel.pp), "ranks", "1", 1, kMaxRanks, "Trainer: stages, each with layers of its own."},
      {"parallel.ep", +FIELD(parallel.ep), "ranks", "1", 1, kMaxRanks,
       "Trainer: ranks among which the experts of a stage are spread. Divides dp."},
      {"parallel.dp", +FIELD(parallel.dp), "ranks", "0", 0, kMaxRanks,
       "Trainer: ranks with the same dense weights, which share the samples of a step. tp x pp x dp is the number of ranks that mpirun or "
       "srun started, without parallel.rollout_ranks; 0 means what that leaves."},
      {"parallel.stages", +FIELD(parallel.stages), "layers", "", 0, 0,
       "Trainer: layers of each stage, separated by commas (12,11,11,9); empty balances the stages by operations."},
      {"parallel.rollout_tp", +FIELD(parallel.rollout_tp), "ranks", "0", 0, kMaxRanks,
       "Sampler: ranks that are one engine; 0 means 1. Every engine samples its share of a step."},
      {"parallel.rollout_ep", +FIELD(parallel.rollout_ep), "ranks", "0", 0, kMaxRanks,
       "Sampler: engines among which experts are spread; 0 means parallel.ep, in eval 1. Where the two layouts differ, weights are copied after each "
       "step."},
      {"parallel.rollout_ranks", +FIELD(parallel.rollout_ranks), "ranks", "0", 0, kMaxRanks,
       "The last so many of the ranks that were started only sample, and the others only train; 0: every rank does both. Then parallel.deadline_s must cover "
       "a whole rollout, and the training of a whole step, because one side waits for the other."},
      {"parallel.deadline_s", +FIELD(parallel.deadline_s), "seconds", "600.0", 1, 1e6,
       "Longest wait of one rank for another before the job ends as stalled. It covers how much one rank's share can take longer "
       "than another's, and the writing of a checkpoint."},
      {"parallel.transport", choice<FIELD(parallel.transport)>(kTransportWords), "", "auto", 0, 0,
       "With device = gpu, how ranks move what lies on their GPUs. device: NCCL or RCCL, from GPU to GPU; every rank needs a GPU of its own and the library. host: by way "
       "of the host's memory and MPI. auto: device where it can be. Results do not depend on it."},

      {"model.config", +FIELD(model.config), "path", "", 0, 0,
       "The model's config.json. May be empty when model.init is a checkpoint directory that holds one."},
      {"model.init", +FIELD(model.init), "path", "random", 0, 0,
       "Initial weights: the word random, a checkpoint directory, a run directory (its newest checkpoint) or a safetensors file."},
      {"model.tokenizer", +FIELD(model.tokenizer), "path", "", 0, 0,
       "A tokenizer.json of a released model, a tokenizer_lockstep.json, or the directory of one; the word bytes for one id a byte; empty to take the one beside the checkpoint "
       "or config.json, or bytes if there is none."},
      {"model.numerics", choice<FIELD(model.numerics)>(kNumericsWords), "", "bf16", 0, 0,
       "Arithmetic of the trainer, and without rollout.numerics of the sampler; sums and gradients are f32. bf16: weights and activations in it. fp8: the large layers "
       "multiply 8-bit codes of both, the rest is bf16; half the weights' memory. fp4: fp8 with experts' weights in 4 bits. f32 is "
       "slower and for tests."},
      {"model.kv_fp8", +FIELD(model.kv_fp8), "", "false", 0, 0,
       "Round keys to 8 bits before attention keeps and reads them, in sampler and trainer alike. For models trained so."},
      {"model.index_fp4", +FIELD(model.index_fp4), "", "false", 0, 0,
       "Rotate indexer queries and keys and round them to 4 bits before they are compared, in sampler and trainer alike. For models "
       "trained so; index_head_dim must be a power of two."},

      {"task.train_file", +FIELD(task.train_file), "path", "", 0, 0,
       "JSON lines with prompt (or text) and label: what is trained on."},
      {"task.eval_file", +FIELD(task.eval_file), "path", "", 0, 0,
       "The same form: what evaluations ask. Keep it apart from the training file."},
      {"task.format", choice<FIELD(task.style.format)>(kDataFormatNames), "", "auto", 0, 0,
       "Where rows of task.train_file, task.eval_file and sft.file have their members: as Miles, slime, verl, OpenRLHF or TRL users write them; auto finds "
       "prompt, messages, text, input, question or problem, and label, reward_model.ground_truth, answer, solution or ground_truth. The log says which it took."},
      {"task.prompt_key", +FIELD(task.style.prompt_key), "", "", 0, 0,
       "The member with the prompt, instead of the format's; a dot steps into an object."},
      {"task.label_key", +FIELD(task.style.label_key), "", "", 0, 0, "Likewise for the label. Name it where a row has several that might be it."},
      {"task.prompt_template", +FIELD(task.style.prompt_template), "", "", 0, 0,
       "Wording around prompts that are text (lists of messages have their own): dapo asks for a last line Answer: \\boxed{...}, dapo_plain for Answer: ..., "
       "boxed for steps and a boxed answer, as is usual for AIME; or your own text with {} where the prompt goes. It must ask for what task.reward looks for."},
      {"task.chat", choice<FIELD(task.style.chat)>(kPromptChatNames), "", "none", 0, 0,
       "chat and thinking write prompts in DeepSeek-V4's chat format, without or with a thinking block, a text as one message of the user; the tokenizer must be a "
       "V4 tokenizer.json. none leaves text as it is and refuses lists of messages. A row's own thinking_mode comes first."},
      {"task.drop_thinking", +FIELD(task.style.drop_thinking), "", "true", 0, 0,
       "In thinking mode, leave out the reasoning of turns before the last message of the user. A row's own drop_thinking comes first."},
      {"task.reasoning_effort", choice<FIELD(task.style.reasoning_effort)>(kReasoningEffortNames), "", "none", 0, 0,
       "In thinking mode, max asks for it in a paragraph before the conversation; high writes nothing, as in the release. A row's own comes first."},
      {"task.reward", choice<FIELD(task.reward.grader)>(kGraderNames), "", "default", 0, 0,
       "How a response is judged against its label: default reads the last boxed answer as mathematics and compares values; math "
       "and deepscaler compare normalised text, with answers behind </think> for the latter; dapo takes the last Answer: line and "
       "scores 1 or -1; exact compares the whole trimmed text; math_miles, dapo_miles and dapo_verl decide as those public graders "
       "do; command and http ask a program or a server of yours. The prompts must ask for the form that the grader looks for."},
      {"task.reward_command", +FIELD(task.reward.command), "shell", "", 0, 0,
       "The program of task.reward = command: reads a JSON object a line, {id, prompt, response, label}, and answers each with a "
       "line {id, score} (or {id, error}; correct, pred and reason as it likes). One copy a worker; one that crashes is started anew."},
      {"task.reward_url", +FIELD(task.reward.url), "URL", "", 0, 0,
       "The server of task.reward = http: gets arrays of such objects by POST and answers an array of verdicts."},
      {"task.reward_workers", +FIELD(task.reward.workers), "", "0", 0, 1024,
       "Threads, programs or connections that judge at once; 0 means one a core. Results do not depend on it."},
      {"task.reward_deadline_s", +FIELD(task.reward.deadline_s), "seconds", "10.0", 0.01, 1e5,
       "Longest wait for a command's answer to one row, or a server's to one request. Rows that stay unanswered are not trained on."},
      {"task.reward_thinking", +FIELD(task.reward.thinking), "", "false", 0, 0,
       "Responses begin inside a thinking block: only what follows the last </think> is judged, and nothing is correct without it."},
      {"task.max_prompt_tokens", +FIELD(task.max_prompt_tokens), "tokens", "256", 1, kMaxInteger,
       "Longer prompts are dropped and counted. With max_new_tokens it must fit into the model's max_position_embeddings."},
      {"task.max_bad_rows", +FIELD(task.max_bad_rows), "fraction", "0", 0, 1,
       "Share of unreadable data rows that is tolerated; more stop the run at once."},

      {"rollout.prompts_per_step", +FIELD(rollout.prompts_per_step), "prompts", "16", 1, kMaxAtOnce,
       "Prompts (groups) of one step."},
      {"rollout.samples_per_prompt", +FIELD(rollout.samples_per_prompt), "samples", "8", 1, 65536,
       "Samples of each prompt: the group that advantages compare. More give a steadier baseline and cost in proportion."},
      {"rollout.temperature", +FIELD(rollout.temperature), "", "1.0", 0, 100,
       "Divides the logits, in sampling and in training alike. Below 1 explores less."},
      {"rollout.top_k", +FIELD(rollout.top_k), "tokens", "0", 0, kMaxInteger,
       "Keep the k likeliest tokens; 0 is off. Only off is accepted in training, where log-probs of a truncated distribution "
       "cannot be trained on."},
      {"rollout.top_p", +FIELD(rollout.top_p), "probability", "1.0", 1e-6, 1,
       "Keep the likeliest tokens of this mass; 1 is off. Only off is accepted in training."},
      {"rollout.min_p", +FIELD(rollout.min_p), "probability", "0.0", 0, 1,
       "Keep tokens at least this share of the likeliest one's probability; 0 is off. Only off is accepted in training."},
      {"rollout.max_new_tokens", +FIELD(rollout.max_new_tokens), "tokens", "64", 1, kMaxInteger,
       "Longest response; longer ones end as truncated."},
      {"rollout.max_running", +FIELD(rollout.max_running), "samples", "64", 1, kMaxAtOnce,
       "Samples decoding at once. More is faster until memory or cores are full."},
      {"rollout.max_batch_tokens", +FIELD(rollout.max_batch_tokens), "tokens", "1024", 1, kMaxTokens,
       "Rows of one forward, prompt chunks included. Raise for long prompts."},
      {"rollout.graphs", +FIELD(rollout.graphs), "", "true", 0, 0,
       "On a GPU, steps that only draw next tokens are enqueued as graphs, by one call instead of one for every kernel. No bit depends on it; turn it off to look at single kernels."},
      {"rollout.ahead", +FIELD(rollout.ahead), "steps", "0", 0, 1,
       "1: the next step's samples are drawn while this one's are trained on, from the weights that it began with, so they are a step old when their turn comes; "
       "for runs with parallel.rollout_ranks, where nobody waits then. train.tis corrects for it."},
      {"rollout.over_sample", +FIELD(rollout.over_sample), "", "1.0", 1, 64,
       "A step begins this times prompts_per_step prompts and stops when prompts_per_step groups are complete; the others go first in the next step. Nobody waits for the "
       "longest responses then; short ones are trained earlier than long ones. For rollout.ahead = 0."},
      {"rollout.partial", choice<FIELD(rollout.partial)>(kPartialWords), "", "keep", 0, 0,
       "What becomes of the samples of groups that were not complete: keep goes on from their tokens under the next weights, so that a sample may be of several versions, for which "
       "train.tis corrects; drop draws them anew."},
      {"rollout.order", choice<FIELD(rollout.order)>(kOrderWords), "", "given", 0, 0,
       "Which prompts of a step the engine begins with: longest takes those first whose longest response so far was longest, unseen ones before all. No sample changes; "
       "a step takes fewer forwards where lengths differ much."},
      {"rollout.numerics", choice<FIELD(model.sampler)>(kSamplerNumericsWords), "", "same", 0, 0,
       "Arithmetic of the sampler alone; same is model.numerics, whose log-probs the trainer then must meet bit for bit. fp8 or fp4 beside a trainer in bf16 "
       "samples with quantised weights, made anew from the masters after each step: the gap is measured, and train.tis and train.replay answer it."},

      {"sync.delta", +FIELD(sync.delta), "", "false", 0, 0,
       "Where the sampler has weights of its own: only blocks of 8 bytes that a step changed travel and are written. The weights are the same. Saves bytes between "
       "ranks at small learning rates, and costs a copy of what each rank sends."},
      {"sync.full_every", +FIELD(sync.full_every), "updates", "16", 1, kMaxInteger, "With sync.delta: one update in so many carries everything; 1 carries everything always."},

      {"train.advantage", choice<FIELD(train.advantage)>(kAdvantageWords), "", "grpo", 0, 0,
       "Rewards to advantages: grpo divides the group's deviation by its spread, dr_grpo does not, rloo leaves the sample out of "
       "its baseline, batch_std divides by the spread of the batch, "
       "reinforce_pp whitens over the batch, reinforce_pp_baseline does so after subtracting the group mean."},
      {"train.aggregation", choice<FIELD(train.loss.aggregation)>(kAggregationWords), "", "token_mean", 0, 0,
       "How token losses become one number: over all tokens, or first within each response. dr_grpo goes with "
       "seq_mean_token_sum_norm."},
      {"train.norm_length", +FIELD(train.loss.norm_length), "tokens", "0.0", 0, kMaxReal,
       "The constant length of seq_mean_token_sum_norm, usually rollout.max_new_tokens."},
      {"train.count_empty_sequences", +FIELD(train.loss.count_empty_sequences), "", "true", 0, 0,
       "Fully masked samples count in the number of sequences."},
      {"train.clip_low", +FIELD(train.loss.clip_low), "", "0.2", 0, 1, "The policy ratio is clipped below at 1 - this."},
      {"train.clip_high", +FIELD(train.loss.clip_high), "", "0.28", 0, kMaxReal,
       "The policy ratio is clipped above at 1 + this."},
      {"train.dual_clip", +FIELD(train.loss.dual_clip), "", "0.0", 0, kMaxReal,
       "Bounds the loss of tokens with negative advantage at this times the advantage; above 1, or 0 for off."},
      {"train.tis", choice<FIELD(train.loss.tis)>(kTisWords), "", "none", 0, 0,
       "Truncated importance sampling: policy losses times exp(trainer's - sampler's log-prob), of each token or summed over the response. Changes nothing where the "
       "two are equal."},
      {"train.tis_low", +FIELD(train.loss.tis_low), "", "0.0", 0, 1, "Least such weight."},
      {"train.tis_high", +FIELD(train.loss.tis_high), "", "2.0", 1, kMaxReal, "Largest such weight."},
      {"train.tis_mask_low", +FIELD(train.loss.tis_mask_low), "", "0.0", 0, 1, "With tis_mask_high: tokens, or responses, whose weight is below lose their policy loss."},
      {"train.tis_mask_high", +FIELD(train.loss.tis_mask_high), "", "0.0", 0, kMaxReal, "Likewise above; at least 1, or 0 for no mask."},
      {"train.tis_veto", +FIELD(train.loss.tis_veto), "", "0.0", 0, 1,
       "A response with one token whose weight exp(trainer's - sampler's log-prob) is below loses its policy loss, with or without train.tis; 1e-4 is usual, 0 is off."},
      {"train.opsm", +FIELD(train.loss.opsm), "nat", "0.0", 0, kMaxReal,
       "Off-policy sequence masking: tokens with a negative advantage lose their policy loss where the mean of old - present log-prob over the response is above; 1e-4 is "
       "usual, 0 is off. Matters with train.steps_per_rollout above 1."},
      {"train.replay", choice<FIELD(train.replay)>(kReplayWords), "", "none", 0, 0,
       "The trainer repeats what a sampler of other numerics chose: the experts of every token, and with routing+index the entries that sparse attention reads. "
       "The sampler records them as it draws: 2 bytes a token, layer and chosen expert, 4 for each entry where it cannot read all."},
      {"train.kl", choice<FIELD(train.loss.kl)>(kKlWords), "", "none", 0, 0,
       "Estimator of the KL divergence from the initial weights, added to the loss. Costs one more forward a step."},
      {"train.kl_coef", +FIELD(train.loss.kl_coef), "", "0.0", 0, kMaxReal, "Its weight."},
      {"train.entropy_coef", +FIELD(train.loss.entropy_coef), "", "0.0", -kMaxReal, kMaxReal,
       "Weight of the entropy bonus. Raise when the policy collapses early."},
      {"train.mask_truncated", +FIELD(train.mask_truncated), "", "false", 0, 0,
       "Truncated responses count in their group's statistics but are not trained on. Use when the length limit cuts good "
       "reasoning."},
      {"train.overlong_buffer", +FIELD(train.overlong_buffer), "tokens", "0", 0, kMaxInteger,
       "Responses that end in the last so many tokens before rollout.max_new_tokens lose reward, in a line down to "
       "overlong_factor; 0 is off."},
      {"train.overlong_factor", +FIELD(train.overlong_factor), "", "1.0", 0, kMaxReal,
       "What a response of the full length loses."},
      {"train.steps_per_rollout", +FIELD(train.steps_per_rollout), "steps", "1", 1, kMaxInteger,
       "Optimizer steps on each rollout, each on an equal share of its samples."},
      {"train.microbatch_tokens", +FIELD(train.microbatch_tokens), "tokens", "4096", 1, kMaxTokens,
       "Tokens of one forward and backward; bounds activation memory. Gradients do not depend on it beyond rounding."},
      {"train.recompute", +FIELD(train.recompute), "", "false", 0, 0,
       "Keep only each layer's input and run layers again in backward: less memory, about a third more time."},

      {"optimizer.lr", +FIELD(optimizer.lr), "", "0.001", 0, 100,
       "Learning rate of train after warm-up. 1e-3 suits tiny models trained from scratch; fine-tuning a large one wants 1e-6."},
      {"optimizer.beta1", +FIELD(optimizer.beta1), "", "0.9", 0, 0.999999, "Decay of the first moment."},
      {"optimizer.beta2", +FIELD(optimizer.beta2), "", "0.98", 0, 0.999999, "Decay of the second moment."},
      {"optimizer.eps", +FIELD(optimizer.eps), "", "1e-08", 1e-30, 1, "Added to the root of the second moment."},
      {"optimizer.weight_decay", +FIELD(optimizer.weight_decay), "", "0.0", 0, 1,
       "Decoupled decay of matrices; gains, biases and sinks are never decayed."},
      {"optimizer.clip_norm", +FIELD(optimizer.clip_norm), "", "1.0", 0, kMaxReal, "Largest global gradient norm; 0 is off."},
      {"optimizer.schedule", choice<FIELD(optimizer.schedule)>(kScheduleWords), "", "constant", 0, 0,
       "Learning rate after warm-up."},
      {"optimizer.warmup_steps", +FIELD(optimizer.warmup_steps), "steps", "0", 0, kMaxInteger,
       "Optimizer steps of linear warm-up."},
      {"optimizer.total_steps", +FIELD(optimizer.total_steps), "steps", "0", 0, kMaxInteger,
       "End of the cosine; 0 means the run's last optimizer step."},
      {"optimizer.min_lr_ratio", +FIELD(optimizer.min_lr_ratio), "fraction", "0.0", 0, 1,
       "Learning rate at the cosine's end, as a share of optimizer.lr."},
      {"optimizer.max_skipped", +FIELD(optimizer.max_skipped), "steps", "5", 1, kMaxInteger,
       "Steps in a row with a gradient that is not finite before the run stops."},
      {"optimizer.freeze_router", +FIELD(optimizer.freeze_router), "", "true", 0, 0,
       "Do not train the experts' router. Turn off when training from random weights."},
      {"optimizer.freeze_indexer", +FIELD(optimizer.freeze_indexer), "", "true", 0, 0,
       "Do not step the indexer, which the loss does not reach."},

      {"sft.file", +FIELD(sft.file), "path", "", 0, 0,
       "JSON lines with prompt and completion; the completion and the end token are trained."},
      {"sft.steps", +FIELD(sft.steps), "steps", "200", 0, kMaxSteps, "Optimizer steps."},
      {"sft.batch_size", +FIELD(sft.batch_size), "samples", "32", 1, kMaxAtOnce, "Samples of one step."},
      {"sft.lr", +FIELD(sft.lr), "", "0.001", 0, 100,
       "Learning rate of sft. It has its own schedule and warmup_steps too, and shares the rest of [optimizer] with train."},
      {"sft.schedule", choice<FIELD(sft.schedule)>(kScheduleWords), "", "cosine", 0, 0,
       "Learning rate after warm-up; the cosine ends at the last step."},
      {"sft.warmup_steps", +FIELD(sft.warmup_steps), "steps", "20", 0, kMaxInteger, "Optimizer steps of linear warm-up."},

      {"eval.samples", +FIELD(eval.samples), "samples", "8", 1, 65536,
       "Samples of each problem; pass@k is given for the powers of two up to it."},
      {"eval.problems", +FIELD(eval.problems), "problems", "0", 0, kMaxInteger,
       "Ask only the first so many problems; 0 asks all."},
      {"eval.temperature", +FIELD(eval.temperature), "", "1.0", 0, 100, "Divides the logits; 0 is greedy."},
      {"eval.top_k", +FIELD(eval.top_k), "tokens", "0", 0, kMaxInteger, "Keep the k likeliest tokens; 0 is off."},
      {"eval.top_p", +FIELD(eval.top_p), "probability", "1.0", 1e-6, 1, "Keep the likeliest tokens of this mass; 1 is off."},
      {"eval.max_new_tokens", +FIELD(eval.max_new_tokens), "tokens", "64", 1, kMaxInteger, "Longest response."},
      {"eval.seed", +FIELD(eval.seed), "", "0", 0, kMaxInteger,
       "Keys the draws of evaluations: the same weights asked again answer the same."},

      {"demo.train_problems", +FIELD(demo.train_problems), "problems", "4000", 1, kMaxArithmeticItems,
       "Problems that reinforcement learning asks; only `lockstep demo` reads this section."},
      {"demo.eval_problems", +FIELD(demo.eval_problems), "problems", "100", 1, kMaxArithmeticItems,
       "Held-out problems of the evaluations before and after."},
      {"demo.sft_examples", +FIELD(demo.sft_examples), "examples", "4000", 1, kMaxArithmeticItems,
       "Worked examples of the supervised warm start."},
      {"demo.difficulty_min", +FIELD(demo.difficulty_min), "", "1", 1, kMaxDifficulty,
       "Easiest problems: 1 is mostly one digit."},
      {"demo.difficulty_max", +FIELD(demo.difficulty_max), "", "1", 1, kMaxDifficulty, "Hardest problems: 3 is three digits."},
      {"demo.unboxed_share", +FIELD(demo.unboxed_share), "fraction", "0.0", 0, 1,
       "Share of the worked examples that stop before the boxed answer, as text found in the wild does. The higher, the more is left to reinforcement."},
      {"demo.families", +FIELD(demo.families), "", "", 0, 0,
       "Kinds of problems, separated by commas (add,gcd); empty means all."},
  };
  return table;
}

#undef FIELD

const Setting* find_setting(std::string_view name) {
  for (const Setting& s : rows()) {
    if (s.name == name) return &s;
  }
  return nullptr;
}

// Empty for a key that stands above all sections.
std::string_view section_of(std::string_view name) { return name.substr(0, name.find('.') == std::string_view::npos ? 0 : name.find('.')); }
std::string_view key_of(std::string_view name) { return name.substr(name.find('.') + 1); }

std::string unknown_key(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Setting& s : rows()) known.push_back(s.name);
  const std::string near = nearest_name(name, known);
  if (!near.empty()) return fmt::format("{} is not a known key; did you mean {}?", name, near);
  return fmt::format("{} is not a known key; `lockstep settings` lists them all", name);
}

std::string join_words(std::span<const std::string_view> words) {
  std::string out;
  for (const std::string_view w : words) out += (out.empty() ? "" : " | ") + std::string(w);
  return out;
}

std::string format_real(double v) {
  std::string text = fmt::format("{}", v);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}
std::string format_real(float v) {
  std::string text = fmt::format("{}", v);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string range_text(const Setting& s) {
  if (const auto* c = std::get_if<Choice>(&s.field)) return join_words(c->words);
  const bool integer = std::holds_alternative<int64_t& (*)(RunConfig&)>(s.field);
  const bool real = std::holds_alternative<float& (*)(RunConfig&)>(s.field);
  if (!integer && !real) return "";
  const double top = integer ? kMaxInteger : kMaxReal;
  if (s.min <= -kMaxReal) return "any";
  if (s.max >= top) return fmt::format(">= {}", s.min);
  return fmt::format("{} .. {}", s.min, s.max);
}

// The forms in which values arrive.
using Value = std::variant<bool, int64_t, double, std::string>;

std::string describe(const Value& v) {
  struct Visitor {
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(int64_t i) const { return fmt::format("{}", i); }
    std::string operator()(double d) const { return format_real(d); }
    std::string operator()(const std::string& s) const { return fmt::format("\"{}\"", s); }
  };
  return std::visit(Visitor{}, v);
}

Status wrong_type(const Setting& s, const Value& v, std::string_view wanted) {
  return errorf("{} is {}, expected {}", s.name, describe(v), wanted);
}

Status check_range(const Setting& s, double v, const Value& given) {
  if (v >= s.min && v <= s.max) return Status::ok();
  // Where the table says ">= 0" or "any", what is too large must hear of the limit.
  return errorf("{} is {}, expected {}", s.name, describe(given),
                std::abs(v) > kMaxReal || v > s.max ? fmt::format("{} .. {}", s.min, s.max) : range_text(s));
}

Status assign(const Setting& s, RunConfig& config, const Value& v) {
  struct Visitor {
    const Setting& s;
    RunConfig& config;
    const Value& v;
    Status operator()(bool& (*field)(RunConfig&)) const {
      if (!std::holds_alternative<bool>(v)) return wrong_type(s, v, "true or false");
      field(config) = std::get<bool>(v);
      return Status::ok();
    }
    Status operator()(int64_t& (*field)(RunConfig&)) const {
      if (!std::holds_alternative<int64_t>(v)) return wrong_type(s, v, "an integer");
      LOCKSTEP_RETURN_IF_ERROR(check_range(s, static_cast<double>(std::get<int64_t>(v)), v));
      field(config) = std::get<int64_t>(v);
      return Status::ok();
    }
    Status operator()(float& (*field)(RunConfig&)) const {
      double number = 0;
      if (const auto* i = std::get_if<int64_t>(&v)) {
        number = static_cast<double>(*i);
      } else if (const auto* d = std::get_if<double>(&v)) {
        number = *d;
      } else {
        return wrong_type(s, v, "a number");
      }
      // A NaN fails both comparisons.
      LOCKSTEP_RETURN_IF_ERROR(check_range(s, number, v));
      field(config) = static_cast<float>(number);
      return Status::ok();
    }
    Status operator()(std::string& (*field)(RunConfig&)) const {
      if (!std::holds_alternative<std::string>(v)) return wrong_type(s, v, "a text in quotes");
      const std::string& text = std::get<std::string>(v);
      if (text.find('\0') != std::string::npos) return wrong_type(s, v, "a text without NUL bytes");
      field(config) = text;
      return Status::ok();
    }
    Status operator()(const Choice& c) const {
      const auto* word = std::get_if<std::string>(&v);
      const auto at = word == nullptr ? c.words.end() : std::find(c.words.begin(), c.words.end(), *word);
      if (at == c.words.end()) {
        const std::string near = word == nullptr ? "" : nearest_name(*word, c.words);
        return errorf("{} is {}, expected {}{}", s.name, describe(v), join_words(c.words),
                      near.empty() ? "" : "; did you mean " + near + "?");
      }
      c.set(config, static_cast<int>(at - c.words.begin()));
      return Status::ok();
    }
  };
  return std::visit(Visitor{s, config, v}, s.field);
}

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return v;
}

// Text of --set and of defaults: the row's type says how to read it.
Value value_from_text(const Setting& s, std::string_view text) {
  if (std::holds_alternative<bool& (*)(RunConfig&)>(s.field)) {
    if (text == "true") return true;
    if (text == "false") return false;
  } else if (std::holds_alternative<int64_t& (*)(RunConfig&)>(s.field) ||
             std::holds_alternative<float& (*)(RunConfig&)>(s.field)) {
    if (const auto i = parse_number<int64_t>(text)) return *i;
    if (const auto d = parse_number<double>(text)) return *d;
  }
  return std::string(text);
}

// The value as TOML. Also how tables print it.
std::string value_text(const Setting& s, const RunConfig& config) {
  struct Visitor {
    RunConfig& config;
    std::string operator()(bool& (*field)(RunConfig&)) const { return field(config) ? "true" : "false"; }
    std::string operator()(int64_t& (*field)(RunConfig&)) const { return fmt::format("{}", field(config)); }
    std::string operator()(float& (*field)(RunConfig&)) const { return format_real(field(config)); }
    std::string operator()(std::string& (*field)(RunConfig&)) const {
      std::string out = "\"";
      for (const char ch : field(config)) {
        const auto byte = static_cast<unsigned char>(ch);
        if (ch == '"' || ch == '\\') {
          out += '\\';
          out += ch;
        } else if (byte < 0x20 || byte == 0x7f) {
          out += fmt::format("\\u{:04X}", byte);
        } else {
          out += ch;
        }
      }
      return out + '"';
    }
    std::string operator()(const Choice& c) const { return fmt::format("\"{}\"", c.words[static_cast<size_t>(c.get(config))]); }
  };
  return std::visit(Visitor{const_cast<RunConfig&>(config)}, s.field);
}

std::string pad(std::string text, size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

// Wraps at blanks; every line after the first starts with `indent` blanks.
std::string wrap(std::string_view text, size_t indent, size_t width) {
  std::string out;
  size_t column = indent;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    if (column > indent && column + 1 + word.size() > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    }
    if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

// Refuses text on which the TOML library leaves defined behaviour (its issues 190 and 295): characters beyond ASCII that it meets
// outside of strings and comments, or in strings of several lines. No setting needs those, nor quotes but around its value.
Status check_characters(std::string_view text, std::string_view file) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);  // a byte order mark
  int64_t line = 1;
  char quote = 0;  // what closes the string at hand; 0 outside of strings
  bool comment = false;
  bool behind_equals = false, value_next = false;  // the line's first '=' was passed; nothing but blanks followed it
  for (size_t i = 0; i < text.size(); ++i) {
    const char ch = text[i];
    if (ch == '\n') {
      if (quote != 0) return errorf("{}:{}: a string must end on its line", file, line);
      comment = behind_equals = value_next = false;
      ++line;
    } else if (quote != 0) {
      if (ch == quote) {
        quote = 0;
      } else if (ch == '\\' && quote == '"' && !text.substr(i + 1).starts_with('\n')) {
        ++i;
      }
    } else if (comment || ch == '#') {
      comment = true;
    } else if (ch == '"' || ch == '\'') {
      if (!value_next) return errorf("{}:{}: a quote that does not open the value behind the line's =", file, line);
      if (text.substr(i + 1).starts_with(std::string(2, ch)))
        return errorf("{}:{}: strings of several lines are not read; write the text on one line", file, line);
      quote = ch;
      value_next = false;
    } else if (static_cast<unsigned char>(ch) >= 0x80) {
      return errorf("{}:{}: a character that is not ASCII outside of quotes; is it a no-break space or a typographic quote?", file, line);
    } else if (ch == '=' && !behind_equals) {
      behind_equals = value_next = true;
    } else if (ch != ' ' && ch != '\t') {
      value_next = false;
    }
  }
  return Status::ok();
}

Status read_value(ResolvedConfig& config, const std::string& name, const std::string& where, const toml::node& value) {
  const Setting* s = find_setting(name);
  if (s == nullptr) return errorf("{}: {}", where, unknown_key(name));
  Value v;
  if (const auto* b = value.as_boolean()) {
    v = b->get();
  } else if (const auto* i = value.as_integer()) {
    v = i->get();
  } else if (const auto* d = value.as_floating_point()) {
    v = d->get();
  } else if (const auto* t = value.as_string()) {
    v = t->get();
  } else {
    return errorf("{}: {} is a table, list or date, expected a single value", where, name);
  }
  if (const Status status = assign(*s, config.values, v); !status) return errorf("{}: {}", where, status.message());
  config.origin.insert_or_assign(name, where);
  return Status::ok();
}

Status read_table(ResolvedConfig& config, const toml::table& root, std::string_view file) {
  for (auto&& [section, node] : root) {
    const toml::table* table = node.as_table();
    const auto line = section.source().begin.line;
    const std::string_view name = section.str();
    if (table == nullptr || find_setting(name) != nullptr) {
      if (std::any_of(rows().begin(), rows().end(), [&](const Setting& s) { return section_of(s.name) == name; }))
        return errorf("{}:{}: {} is a section: write [{}], and its keys in the lines below", file, line, name, name);
      LOCKSTEP_RETURN_IF_ERROR(read_value(config, std::string(name), fmt::format("{}:{}", file, line), node));
      continue;
    }
    for (auto&& [key, value] : *table)
      LOCKSTEP_RETURN_IF_ERROR(read_value(config, fmt::format("{}.{}", name, key.str()), fmt::format("{}:{}", file, key.source().begin.line), value));
  }
  return Status::ok();
}

}  // namespace

const char* Setting::type_name() const {
  static constexpr const char* kNames[] = {"boolean", "integer", "number", "text", "word"};
  return kNames[field.index()];
}

std::span<const Setting> settings() { return rows(); }

std::string ResolvedConfig::where(std::string_view name) const {
  const auto at = origin.find(name);
  return at == origin.end() ? "default" : at->second;
}

ResolvedConfig default_config() {
  ResolvedConfig config;
  for (const Setting& s : rows()) {
    const Status status = assign(s, config.values, value_from_text(s, s.default_value));
    CHECK(status.is_ok(), "the default of {}", status.message());
  }
  return config;
}

Status read_config(ResolvedConfig& config, std::string_view text, std::string_view file) {
  LOCKSTEP_RETURN_IF_ERROR(check_characters(text, file));
  try {
    return read_table(config, toml::parse(text, std::string(file)), file);
  } catch (const toml::parse_error& e) {
    return errorf("{}:{}: {}", file, e.source().begin.line, e.description());
  } catch (const TomlAssertion&) {
    return errorf("{}: not valid TOML", file);
  }
}

Status apply_override(ResolvedConfig& config, std::string_view assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos) return errorf("--set {}: expected section.key=value", assignment);
  const std::string_view name = assignment.substr(0, equals);
  const Setting* s = find_setting(name);
  if (s == nullptr) return errorf("--set {}: {}", assignment, unknown_key(name));
  const std::string_view text = assignment.substr(equals + 1);
  if (text.size() > 1 && text.starts_with('"') && text.ends_with('"'))
    return errorf("--set {}: leave out the quotes, the text behind = is taken as it is", assignment);
  if (const Status status = assign(*s, config.values, value_from_text(*s, text)); !status) {
    return errorf("--set {}: {}", assignment, status.message());
  }
  config.origin.insert_or_assign(std::string(name), fmt::format("--set {}", name));
  return Status::ok();
}

Result<ResolvedConfig> load_config(const std::string& path, std::span<const std::string> overrides) {
  Result<std::string> text = read_file(path);
  if (!text) return text.status();
  ResolvedConfig config = default_config();
  LOCKSTEP_RETURN_IF_ERROR(read_config(config, text.value(), path));
  for (const std::string& o : overrides) LOCKSTEP_RETURN_IF_ERROR(apply_override(config, o));
  LOCKSTEP_RETURN_IF_ERROR(check_config(config));
  return config;
}

namespace {

// "run.toml:7: rollout.top_p is 0.9; WHY"
Status setting_error(const ResolvedConfig& config, std::string_view name, std::string_view why) {
  const std::string value = value_text(*find_setting(name), config.values), where = config.where(name);
  if (where == "default") return errorf("{} is {} by default; {}", name, value, why);
  return errorf("{}: {} is {}; {}", where, name, value, why);
}

Status require_text(const ResolvedConfig& config, std::string_view name, const std::string& value, std::string_view why) {
  return value.empty() ? setting_error(config, name, why) : Status::ok();
}

}  // namespace

Status check_config(const ResolvedConfig& config) {
  const RunConfig& c = config.values;
  if (c.model.config.empty() && c.model.init == "random") {
    return setting_error(config, "model.config",
                         "random weights need a config.json, or name a checkpoint directory in model.init");
  }
  for (const auto& [name, temperature] : {std::pair{"rollout.temperature", c.rollout.temperature}, {"eval.temperature", c.eval.temperature}}) {
    if (temperature > 0 && temperature < kMinTemperature)
      return setting_error(config, name, fmt::format("logits divided by it overflow; use 0 for greedy, or at least {}", kMinTemperature));
  }
  if (const std::string& t = c.task.style.prompt_template; !t.empty()) {
    if (const Result<std::string> found = find_prompt_template(t); !found) return setting_error(config, "task.prompt_template", found.message());
    const GraderKind grader = c.task.reward.grader;
    const bool reads_boxes = grader != GraderKind::exact && grader != GraderKind::command && grader != GraderKind::http;
    const bool reads_lines = grader == GraderKind::dapo || grader == GraderKind::dapo_miles || grader == GraderKind::dapo_verl;
    if ((t == "dapo_plain" && reads_boxes && !reads_lines) || (t == "boxed" && grader == GraderKind::dapo_miles) ||
        (grader == GraderKind::exact && t.find("{}") == std::string::npos))
      return setting_error(config, "task.prompt_template",
                           fmt::format("task.reward = {} does not look for the form that it asks for, so that every answer would be wrong",
                                       kGraderNames[static_cast<size_t>(grader)]));
  }
  if (c.task.reward.grader == GraderKind::command)
    LOCKSTEP_RETURN_IF_ERROR(require_text(config, "task.reward_command", c.task.reward.command, "task.reward = command needs a program"));
  if (c.task.reward.grader == GraderKind::http)
    LOCKSTEP_RETURN_IF_ERROR(require_text(config, "task.reward_url", c.task.reward.url, "task.reward = http needs a server"));
  if (c.train.loss.dual_clip != 0 && c.train.loss.dual_clip <= 1) {
    return setting_error(config, "train.dual_clip", "it must be above 1, or 0 for off");
  }
  if (c.train.loss.tis_mask_high != 0 && c.train.loss.tis_mask_high < 1)
    return setting_error(config, "train.tis_mask_high", "a weight of 1 must pass; use at least 1, or 0 for no mask");
  if (c.train.loss.tis_mask_low != 0 && c.train.loss.tis_mask_high == 0)
    return setting_error(config, "train.tis_mask_low", "without train.tis_mask_high nothing is masked; set it, or leave this 0");
  if (c.train.loss.tis == TisKind::none && c.train.loss.tis_mask_high != 0)
    return setting_error(config, "train.tis_mask_high", "the mask looks at the weights of train.tis; choose token or sequence there");
  if (c.train.replay != ReplayKind::none && c.model.exact())
    return setting_error(config, "train.replay", "trainer and sampler have the same numerics and choose alike; set rollout.numerics, or none");
  if (!can_follow(c.model.numerics, c.model.sampler_numerics()))
    return setting_error(config, "rollout.numerics",
                         fmt::format("it cannot be made from model.numerics = {}; a trainer in bf16 goes with a sampler in bf16, fp8 or fp4", numerics_name(c.model.numerics)));
  if (c.train.loss.aggregation == Aggregation::seq_mean_token_sum_norm && c.train.loss.norm_length <= 0) {
    return setting_error(config, "train.norm_length",
                         "seq_mean_token_sum_norm needs a length above 0, usually rollout.max_new_tokens");
  }
  if (c.train.loss.kl == KlKind::none && c.train.loss.kl_coef != 0) {
    return setting_error(config, "train.kl_coef", "choose an estimator in train.kl, or leave the weight 0");
  }
  return Status::ok();
}

Status check_train_config(const ResolvedConfig& config) {
  const RunConfig& c = config.values;
  LOCKSTEP_RETURN_IF_ERROR(require_text(config, "run.dir", c.run.dir, "a training run needs a directory"));
  LOCKSTEP_RETURN_IF_ERROR(require_text(config, "task.train_file", c.task.train_file, "training needs prompts"));
  if (c.run.eval_every > 0) {
    LOCKSTEP_RETURN_IF_ERROR(require_text(config, "task.eval_file", c.task.eval_file, "run.eval_every asks for evaluations"));
  }
  constexpr std::string_view kTruncates =
      "training rollouts may not truncate the distribution, because the trainer cannot recompute what was kept; switch it off";
  if (c.rollout.top_k != 0) return setting_error(config, "rollout.top_k", kTruncates);
  if (c.rollout.top_p != 1) return setting_error(config, "rollout.top_p", kTruncates);
  if (c.rollout.min_p != 0) return setting_error(config, "rollout.min_p", kTruncates);
  if (c.rollout.temperature <= 0)
    return setting_error(config, "rollout.temperature", "greedy samples have no distribution to train; use a number above 0");
  if (c.rollout.samples_per_prompt < 2 && c.train.advantage != AdvantageKind::reinforce_pp) {
    return setting_error(config, "rollout.samples_per_prompt",
                         "this advantage compares the samples of a group and needs at least 2");
  }
  if (c.train.overlong_buffer > c.rollout.max_new_tokens) {
    return setting_error(config, "train.overlong_buffer",
                         fmt::format("it must fit into rollout.max_new_tokens = {}", c.rollout.max_new_tokens));
  }
  if (c.rollout.over_sample > 1 && c.rollout.ahead > 0)
    return setting_error(config, "rollout.over_sample", "a batch drawn ahead (rollout.ahead = 1) is drawn to the end; use 1 here, or rollout.ahead = 0");
  const int64_t samples = c.rollout.prompts_per_step * c.rollout.samples_per_prompt;  // within 64 bits by their ranges
  const int64_t begun = submitted_prompts(c.rollout.prompts_per_step, c.rollout.over_sample) * c.rollout.samples_per_prompt;
  if (begun > kMaxStepSamples) {
    return setting_error(config, "rollout.prompts_per_step",
                         fmt::format("with {} samples each a step has {} samples, over {}", c.rollout.samples_per_prompt, begun, kMaxStepSamples));
  }
  if (samples % c.train.steps_per_rollout != 0) {
    return setting_error(config, "train.steps_per_rollout", fmt::format("it must divide the {} samples of a step", samples));
  }
  if (static_cast<double>(c.run.steps) * static_cast<double>(c.train.steps_per_rollout) > kMaxSteps) {
    return setting_error(config, "train.steps_per_rollout",
                         fmt::format("with run.steps = {} these are more than {} optimizer steps", c.run.steps, kMaxSteps));
  }
  return Status::ok();
}

Status check_sft_config(const ResolvedConfig& config) {
  LOCKSTEP_RETURN_IF_ERROR(require_text(config, "run.dir", config.values.run.dir, "a training run needs a directory"));
  return require_text(config, "sft.file", config.values.sft.file, "supervised training needs prompts with completions");
}

Status check_eval_config(const ResolvedConfig& config) {
  return require_text(config, "task.eval_file", config.values.task.eval_file, "an evaluation needs problems");
}

std::string config_toml(const RunConfig& config) {
  std::string out;
  std::string_view section;
  for (const Setting& s : rows()) {
    if (section_of(s.name) != section) {
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section_of(s.name));
      section = section_of(s.name);
    }
    out += fmt::format("{} = {}\n", key_of(s.name), value_text(s, config));
  }
  return out;
}

std::string config_table(const RunConfig& config, std::span<const std::string_view> sections) {
  const RunConfig defaults = default_config().values;
  std::string out;
  for (const Setting& s : rows()) {
    if (!sections.empty() && std::find(sections.begin(), sections.end(), section_of(s.name)) == sections.end()) continue;
    const std::string value = value_text(s, config);
    out += fmt::format("{} {} {} {}\n", value == value_text(s, defaults) ? ' ' : '*', pad(std::string(s.name), 29),
                       pad(value, 24), s.unit);
  }
  return out + "* differs from the default\n";
}

std::string settings_help() {
  constexpr size_t kIndent = 6, kWidth = 110;
  std::string out;
  std::string_view section;
  for (const Setting& s : rows()) {
    if (section_of(s.name) != section) {
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section_of(s.name));
      section = section_of(s.name);
    }
    std::string facts = s.type_name();
    if (!s.unit.empty()) facts += fmt::format(", {}", s.unit);
    if (const std::string range = range_text(s); !range.empty()) facts += fmt::format(", {}", range);
    facts += fmt::format(", default {}", s.default_value.empty() ? "empty" : s.default_value);
    out += fmt::format("  {}  ({})\n{}{}\n", s.name, facts, std::string(kIndent, ' '), wrap(s.help, kIndent, kWidth));
  }
  return out;
}

}  // namespace lockstep
