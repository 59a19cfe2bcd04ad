"""What the keys of a run are called in TRL, verl, NeMo Automodel, ms-swift and axolotl.

One table serves the error for an unknown key or option (`peer_hints.py`) and the page docs/coming_from.md. The names
are those of TRL 1.16 (with transformers' TrainingArguments), verl 0.9, Automodel 0.7, ms-swift 4.6 and axolotl 0.19.
"""

from stillhouse.config.peer_absent import ABSENT
from stillhouse.config.peer_key import PeerKey
from stillhouse.config.peer_rollout import ON_POLICY

TABLE = (
    PeerKey(
        ("student.model",),
        trl="model_name_or_path", verl="actor_rollout_ref.model.path",
        automodel="model.pretrained_model_name_or_path", swift="model", axolotl="base_model",
        also="student_model student_model_name_or_path hf_model",
    ),
    PeerKey(
        ("student.revision", "teacher.revision"),
        trl="model_revision teacher_model_revision", swift="model_revision teacher_model_revision",
        axolotl="revision_of_model",
    ),
    PeerKey(
        ("student.dtype", "teacher.dtype"),
        trl="dtype", swift="torch_dtype", also="torch_dtype teacher_dtype", verl="model_dtype",
        note="of the weights; train.precision is the dtype in which the student's layers compute",
    ),
    PeerKey(
        ("student.attention", "teacher.attention"),
        trl="attn_implementation", swift="attn_impl", axolotl="attn_implementation flash_attention",
        automodel="model.attn_implementation", also="use_flash_attention_2 flash_attn",
        note="such as flash_attention_2",
    ),
    PeerKey(
        ("student.adapter",),
        trl="use_peft peft_config", automodel="peft", swift="tuner_type", axolotl="adapter",
        also="train_type lora peft_type",
        note="a section, such as {r: 16, alpha: 32}; left out: all weights are trained",
    ),
    PeerKey(
        ("student.adapter.r",),
        trl="lora_r", verl="actor_rollout_ref.model.lora_rank", automodel="peft.dim", swift="lora_rank",
        axolotl="lora_r", also="rank",
    ),
    PeerKey(
        ("student.adapter.alpha",),
        trl="lora_alpha", verl="actor_rollout_ref.model.lora_alpha", automodel="peft.alpha", swift="lora_alpha",
        axolotl="lora_alpha",
    ),
    PeerKey(
        ("student.adapter.targets",),
        trl="lora_target_modules", verl="actor_rollout_ref.model.target_modules", automodel="peft.target_modules",
        swift="target_modules", axolotl="lora_target_modules lora_target_linear",
        note="all-linear, or a list of name endings",
    ),
    PeerKey(
        ("student.adapter.dropout",),
        trl="lora_dropout", automodel="peft.dropout", swift="lora_dropout", axolotl="lora_dropout",
    ),
    PeerKey(
        ("teacher.model",),
        trl="teacher_model_name_or_path", verl="distillation.teacher_models.teacher_model.model_path",
        automodel="teacher_model.pretrained_model_name_or_path", swift="teacher_model",
        also="teacher_model_path teacher_path",
    ),
    PeerKey(
        ("teacher.url",),
        trl="teacher_model_server_url", swift="teacher_model_server", axolotl="kd_online_server_base_url",
        verl="actor_rollout_ref.teacher.server_ip actor_rollout_ref.teacher.server_port",
        also="teacher_server_url server_ip server_port teacher_server_port",
        note="the teacher of a server; a server of vLLM also needs teacher.model for exact signals",
    ),
    PeerKey(
        ("teacher.top_k",),
        verl="distillation.distillation_loss.topk", swift="gkd_logits_topk", axolotl="kd_online_topk",
        also="teacher_topk",
        note="only for teacher.signal top_k and chosen: a teacher in the job gives its whole distribution",
    ),
    PeerKey(
        ("teacher.offload",),
        automodel="offload_teacher_model", swift="offload_teacher_model",
        verl="actor_rollout_ref.ref.fsdp_config.param_offload",
    ),
    PeerKey(
        ("teacher.quantize",),
        also="teacher.load_in_4bit teacher.load_in_8bit teacher.quantization teacher.quant_bits",
        note="of the frozen teacher alone: int8 or nf4",
    ),
    PeerKey(
        ("teachers.route",),
        verl="distillation.teacher_key", swift="teacher_tag_key",
        note="the column that names each document's teacher",
    ),
    PeerKey(
        ("data.train",),
        trl="dataset_name", verl="data.train_files", automodel="dataset", swift="dataset", axolotl="datasets",
        also="dataset_path train_file train_files train_dataset dataset_train_split data_path",
        note="a file, folder, glob, saved dataset or hub id (name:config@split)",
    ),
    PeerKey(
        ("data.eval",),
        trl="dataset_test_split", verl="data.val_files",
        automodel="validation_dataset validation_dataset.dataset_name",
        swift="val_dataset split_dataset_ratio", axolotl="val_set_size test_datasets",
        also="eval_dataset validation_file test_size eval_file validation_dataset.path_or_dataset",
        note="a source of the same kinds, or a share such as 0.02",
    ),
    PeerKey(
        ("data.chat_template",),
        trl="chat_template_path", verl="actor_rollout_ref.model.custom_chat_template", swift="template",
        axolotl="chat_template chat_template_jinja",
        note="a Jinja file, or a folder or hub id whose tokenizer has it",
    ),
    PeerKey(
        ("data.max_tokens",),
        trl="max_length", verl="data.max_length",
        automodel="packed_sequence.packed_sequence_size", swift="max_length", axolotl="sequence_len",
        also="max_len max_seq_length max_seq_len seq_length sequence_length cutoff_len model_max_length block_size",
        note="the length of a packed sequence; all sequences are packed",
    ),
    PeerKey(
        ("data.on_error",),
        verl="data.filter_overlong_prompts data.truncation", also="filter_overlong_prompts",
        note="with the section rollout, skip leaves out a prompt that is too long, and raise names it; off-policy, a"
        " completion is cut at its end",
    ),
    PeerKey(
        ("data.cache",),
        axolotl="dataset_prepared_path",
        note="a folder for tokenised text, which later runs read",
    ),
    PeerKey(
        ("data.max_tokens",),
        trl="max_prompt_length", verl="data.max_prompt_length",
        note="the length of prompt and completion together",
    ),
    PeerKey(
        ("objective.loss",),
        trl="beta", swift="beta", axolotl="kd_beta",
        note="beta=0 is forward_kl, beta=1 is reverse_kl, and another beta is jsd(beta)",
    ),
    PeerKey(("objective.loss",), automodel="kd_ratio", note="kd_ratio=r is (1-r)*cross_entropy + r*forward_kl"),
    PeerKey(
        ("objective.loss",),
        verl="distillation.distillation_loss.loss_mode distillation.distillation_loss.distillation_loss_coef",
        automodel="kd_loss_fn", swift="sft_alpha", axolotl="kd_alpha kd_ce_alpha",
        also="actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef"
        " loss alpha kd_loss_weight kd_weight distill_alpha loss_type",
        note="one sum with coefficients, such as 0.3*cross_entropy + 0.7*jsd(0.5)",
    ),
    PeerKey(
        ("objective.temperature",),
        automodel="kd_loss_fn.temperature", axolotl="kd_temperature",
        also="kd_temp distill_temperature",
        note="of the divergence on both sides; rollout.temperature is that of drawn tokens",
    ),
    PeerKey(
        ("objective.tokens",),
        trl="completion_only_loss assistant_only_loss", swift="loss_scale", axolotl="train_on_inputs",
        note="completion (the default) or all",
    ),
    PeerKey(
        ("objective.router_aux_loss",), trl="router_aux_loss_coef", also="aux_loss_coef moe_aux_loss_coeff",
    ),
    *ON_POLICY,
    PeerKey(
        ("train.tokens_per_step",),
        trl="gradient_accumulation_steps", verl="actor_rollout_ref.actor.ppo_mini_batch_size",
        automodel="step_scheduler.global_batch_size", swift="gradient_accumulation_steps global_batch_size",
        axolotl="gradient_accumulation_steps", also="batch_size grad_accum accumulation_steps",
        note="the tokens of an optimizer step over all devices: batch size per device × accumulation × devices ×"
        " sequence length",
    ),
    PeerKey(
        ("train.micro_batch_tokens",),
        trl="per_device_train_batch_size", verl="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        automodel="step_scheduler.local_batch_size", swift="per_device_train_batch_size micro_batch_size",
        axolotl="micro_batch_size",
        also="per_gpu_train_batch_size max_token_len_per_gpu ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu",
        note="in tokens, for memory alone; the batch of an optimizer step is train.tokens_per_step",
    ),
    PeerKey(
        ("train.epochs",),
        trl="num_train_epochs", verl="trainer.total_epochs", automodel="step_scheduler.num_epochs",
        swift="num_train_epochs", axolotl="num_epochs", also="max_epochs n_epochs",
    ),
    PeerKey(
        ("train.steps",),
        trl="max_steps", verl="trainer.total_training_steps", automodel="step_scheduler.max_steps", swift="max_steps",
        axolotl="max_steps", also="num_steps train_iters num_training_steps",
    ),
    PeerKey(
        ("train.learning_rate",),
        trl="learning_rate", verl="actor_rollout_ref.actor.optim.lr", automodel="optimizer.lr",
        swift="learning_rate", axolotl="learning_rate", also="lr max_lr peak_lr",
    ),
    PeerKey(
        ("train.optimizer",),
        trl="optim", automodel="optimizer", swift="optim", axolotl="optimizer", also="optim_type optimizer_type",
        note="adamw, muon, adafactor or adamw_8bit",
    ),
    PeerKey(
        ("train.schedule",),
        trl="lr_scheduler_type", verl="actor_rollout_ref.actor.optim.lr_scheduler_type",
        automodel="lr_scheduler.lr_decay_style", swift="lr_scheduler_type", axolotl="lr_scheduler",
        also="lr_schedule lr_decay_style",
        note="constant, linear, cosine or wsd",
    ),
    PeerKey(
        ("train.warmup",),
        trl="warmup_steps", verl="actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        automodel="lr_scheduler.lr_warmup_steps", swift="warmup_ratio warmup_steps",
        axolotl="warmup_ratio warmup_steps", also="warmup_ratio num_warmup_steps lr_warmup_steps",
        note="below 1 a share of all steps, from 1 on a number of steps",
    ),
    PeerKey(
        ("train.min_learning_rate",),
        verl="actor_rollout_ref.actor.optim.min_lr_ratio", automodel="lr_scheduler.min_lr", also="lr_min min_lr",
        note="as a share of the peak",
    ),
    PeerKey(
        ("train.weight_decay",),
        trl="weight_decay", verl="actor_rollout_ref.actor.optim.weight_decay", automodel="optimizer.weight_decay",
        swift="weight_decay", axolotl="weight_decay", also="wd",
    ),
    PeerKey(
        ("train.betas",),
        trl="adam_beta1 adam_beta2", automodel="optimizer.betas", swift="adam_beta1 adam_beta2",
        axolotl="adam_beta1 adam_beta2", note="a list of both, such as [0.9, 0.95]",
    ),
    PeerKey(
        ("train.eps",),
        trl="adam_epsilon", automodel="optimizer.eps", swift="adam_epsilon", axolotl="adam_epsilon",
        also="train.epsilon optimizer.epsilon",
    ),
    PeerKey(
        ("train.clip",),
        trl="max_grad_norm", verl="actor_rollout_ref.actor.grad_clip", automodel="clip_grad_norm.max_norm",
        swift="max_grad_norm", axolotl="max_grad_norm", also="gradient_clip_val clip_grad gradient_clipping",
    ),
    PeerKey(
        ("train.precision",),
        trl="bf16 fp16", swift="bf16 fp16", axolotl="bf16 fp16", also="mixed_precision amp",
        note="bf16 or fp32; there is no fp16",
    ),
    PeerKey(
        ("train.activation_checkpointing",),
        trl="gradient_checkpointing", verl="actor_rollout_ref.model.enable_gradient_checkpointing",
        automodel="distributed.activation_checkpointing", swift="gradient_checkpointing",
        axolotl="gradient_checkpointing", also="recompute_granularity use_gradient_checkpointing",
    ),
    PeerKey(
        ("eval.every",),
        trl="eval_steps eval_strategy", verl="trainer.test_freq", automodel="step_scheduler.val_every_steps",
        swift="eval_steps", axolotl="eval_steps evals_per_epoch", also="evaluation_strategy eval_interval val_freq",
        note="in steps",
    ),
    PeerKey(
        ("eval.samples",),
        verl="trainer.log_val_generations", axolotl="eval_table_size",
        also="log_completions num_completions_to_print",
        note="of held-out prompts; an on-policy run always writes some completions of its steps to samples.jsonl",
    ),
    PeerKey(
        ("eval.micro_batch_tokens",),
        trl="per_device_eval_batch_size", swift="per_device_eval_batch_size", axolotl="eval_batch_size",
        note="in tokens, for memory alone",
    ),
    PeerKey(
        ("checkpoint.every",),
        trl="save_steps save_strategy", verl="trainer.save_freq", automodel="step_scheduler.ckpt_every_steps",
        swift="save_steps", axolotl="save_steps saves_per_epoch", also="save_interval ckpt_interval",
        note="in steps",
    ),
    PeerKey(
        ("checkpoint.keep",),
        trl="save_total_limit", verl="trainer.max_ckpt_to_keep", swift="save_total_limit", axolotl="save_total_limit",
    ),
    PeerKey(
        ("checkpoint.best",),
        trl="metric_for_best_model load_best_model_at_end", swift="metric_for_best_model",
        axolotl="metric_for_best_model",
    ),
    PeerKey(
        ("checkpoint.greater_is_better",),
        trl="greater_is_better", swift="greater_is_better", axolotl="greater_is_better",
    ),
    PeerKey(
        ("checkpoint.resume",),
        trl="resume_from_checkpoint", verl="trainer.resume_mode", automodel="checkpoint.restore_from",
        swift="resume_from_checkpoint", axolotl="resume_from_checkpoint", also="resume auto_resume",
        note="auto is the default: the same command continues",
    ),
    PeerKey(
        ("parallel.fsdp",),
        trl="fsdp deepspeed", verl="actor_rollout_ref.actor.fsdp_config.fsdp_size", automodel="distributed.dp_size",
        swift="deepspeed fsdp", axolotl="dp_shard_size deepspeed", also="dp_size data_parallel_size zero_stage",
        note="left out under torchrun: over all processes",
    ),
    PeerKey(
        ("parallel.tensor",),
        verl="actor_rollout_ref.actor.megatron.tensor_model_parallel_size", automodel="distributed.tp_size",
        swift="tensor_model_parallel_size", axolotl="tensor_parallel_size", also="tp tp_size",
    ),
    PeerKey(
        ("parallel.pipeline",),
        verl="actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", automodel="distributed.pp_size",
        swift="pipeline_model_parallel_size", also="pp pp_size pipeline_parallel_size",
    ),
    PeerKey(
        ("parallel.schedule",),
        automodel="distributed.pipeline.pp_schedule",
        verl="actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
        also="pp_schedule pipeline_schedule virtual_pipeline_model_parallel_size",
        note="gpipe, 1f1b, interleaved (two stages on each rank), zero_bubble or zbv",
    ),
    PeerKey(
        ("parallel.context",),
        verl="actor_rollout_ref.actor.ulysses_sequence_parallel_size"
        " actor_rollout_ref.actor.megatron.context_parallel_size",
        automodel="distributed.cp_size",
        swift="context_parallel_size sequence_parallel_size", axolotl="context_parallel_size",
        also="cp cp_size sp_size",
    ),
    PeerKey(
        ("parallel.expert",),
        verl="actor_rollout_ref.actor.megatron.expert_model_parallel_size", automodel="distributed.ep_size",
        swift="expert_model_parallel_size", also="ep ep_size expert_parallel_size",
    ),
    PeerKey(
        ("train.timeout",),
        trl="ddp_timeout", automodel="dist_env.timeout_minutes", swift="ddp_timeout", also="timeout_minutes",
        note="in seconds",
    ),
    PeerKey(
        ("parallel.replicate",),
        automodel="distributed.dp_replicate_size", axolotl="dp_replicate_size", also="ddp",
    ),
    PeerKey(
        ("parallel.offload",),
        verl="actor_rollout_ref.actor.fsdp_config.param_offload",
        also="cpu_offload offload_params megatron.param_offload optimizer_offload grad_offload",
    ),
    PeerKey(
        ("track",),
        trl="report_to", verl="trainer.logger", swift="report_to", axolotl="use_wandb use_mlflow use_tensorboard",
        also="wandb logger log_with",
        note="a list of tensorboard, wandb, trackio and mlflow; metrics.jsonl and the report are always written",
    ),
    PeerKey(
        ("out",),
        trl="output_dir", verl="trainer.default_local_dir", automodel="checkpoint.checkpoint_dir", swift="output_dir",
        axolotl="output_dir",
        also="out_dir run_name save_dir ckpt_dir checkpoint_dir logging_dir hydra.run.dir hydra.sweep.dir",
        note="the folder of the run",
    ),
    PeerKey(("seed",), trl="seed data_seed", verl="data.seed", automodel="seed", swift="seed", axolotl="seed"),
    PeerKey(("device",), trl="use_cpu", verl="trainer.device", also="device_map", note="auto, cpu, cuda or mps"),
    *ABSENT,
)  # fmt: skip
