"""Names of other tools for which there is no key here, with what to do instead: the last rows of `peer_names.py`."""

from stillhouse.config.peer_key import PeerKey

ABSENT = (
    PeerKey(
        trl="logging_steps logging_strategy", swift="logging_steps", axolotl="logging_steps",
        also="log_every_n_steps logging_first_step log_freq log_every_steps",
        note="every step is logged: leave it out",
    ),
    PeerKey(
        trl="packing padding_free", swift="packing padding_free", axolotl="sample_packing pad_to_sequence_len",
        also="packing_strategy eval_packing pad_to_multiple_of use_remove_padding",
        note="documents are always packed, and do not see each other: leave it out",
    ),
    PeerKey(
        trl="torch_compile use_liger_kernel", swift="use_liger_kernel", axolotl="torch_compile",
        also="liger_rms_norm liger_rope liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy"
        " torch_compile_backend torch_compile_mode liger_kernel_config use_fused_kernels",
        note="the objective never makes the logits of all tokens, and compiles itself: leave it out",
    ),
    PeerKey(
        trl="dataset_text_field remove_unused_columns", swift="columns remove_unused_columns",
        verl="data.prompt_key", axolotl="field_messages", also="text_column column_mapping label_names",
        note="columns are recognised by their names, which docs/data.md lists; rename yours",
    ),
    PeerKey(
        trl="dataset_num_proc dataloader_num_workers", swift="dataset_num_proc dataloader_num_workers",
        axolotl="dataset_num_proc dataloader_num_workers", verl="data.dataloader_num_workers",
        also="dataset_processes num_workers dataloader_pin_memory dataloader_drop_last dataloader_prefetch_factor"
        " dataloader_persistent_workers preprocessing_num_workers",
        note="text is tokenised once, before training, and data.cache keeps it: leave it out",
    ),
    PeerKey(
        trl="shuffle_dataset", verl="data.shuffle", automodel="dataloader.shuffle", swift="dataset_shuffle",
        axolotl="shuffle_merged_datasets",
        note="each epoch has an order of its own, which the seed decides: leave it out",
    ),
    PeerKey(
        trl="disable_dropout",
        note="the student has the dropout of its config.json, which is none in most language models, an adapter has"
        " student.adapter.dropout, and the teacher has none",
    ),
    PeerKey(
        trl="model_init_kwargs teacher_model_init_kwargs", also="model_kwargs",
        note="write its parts as student.dtype, student.attention, student.revision, and the same for the teacher",
    ),
    PeerKey(
        trl="label_smoothing_factor neftune_noise_alpha", swift="neftune_noise_alpha", axolotl="neftune_noise_alpha",
        note="the objective is exact, without smoothing or noise: leave it out",
    ),
    PeerKey(
        trl="gradient_checkpointing_kwargs", also="activation_checkpointing_kwargs",
        note="train.activation_checkpointing is true or false: leave it out",
    ),
    PeerKey(
        trl="push_to_hub hub_model_id", swift="push_to_hub hub_model_id", axolotl="hub_model_id",
        also="hub_strategy hub_token hub_private_repo",
        note="nothing is uploaded. `stillhouse export` writes a folder that `hf upload` takes",
    ),
    PeerKey(
        trl="do_train do_eval", also="do_predict",
        note="these are commands: stillhouse distill, and stillhouse evaluate for a finished model; the section eval"
        " is about evaluation in a run",
    ),
    PeerKey(
        trl="eval_on_start", verl="trainer.val_before_train", also="eval_delay",
        note="the first evaluation is always before the first step: leave it out",
    ),
    PeerKey(
        trl="vllm_gpu_memory_utilization", swift="vllm_gpu_memory_utilization",
        verl="actor_rollout_ref.rollout.gpu_memory_utilization"
        " actor_rollout_ref.rollout.tensor_model_parallel_size",
        also="vllm_tensor_parallel_size vllm_max_model_length gpu_memory_utilization"
        " inference.tensor_model_parallel_size",
        note="vLLM is a server of its own and takes these as options when you start it; rollout.url or teacher.url is"
        " its address",
    ),
    PeerKey(
        verl="trainer.nnodes trainer.n_gpus_per_node",
        also="nnodes num_nodes n_gpus_per_node nproc_per_node n_gpus num_gpus world_size",
        note="torchrun starts the processes, on each machine: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend"
        " c10d --rdzv-endpoint first-machine:29500 -m stillhouse distill run.yaml; one machine needs only"
        " --nproc-per-node",
    ),
    PeerKey(
        verl="trainer.project_name trainer.experiment_name", automodel="wandb.project wandb.name",
        axolotl="wandb_project wandb_name", also="wandb_entity wandb.entity wandb.dir mlflow_experiment_name",
        note="trackers read their own environment variables, such as WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME; a run"
        " is called as its folder is",
    ),
    PeerKey(
        axolotl="plugins kd_trainer strict",
        note="distillation is what this program does, and unknown keys are always refused: leave it out",
    ),
    PeerKey(
        trl="save_safetensors", automodel="checkpoint.enabled checkpoint.model_save_format",
        axolotl="save_safetensors", also="save_only_model",
        note="checkpoints are always written, as safetensors, with all that a run needs to continue: leave it out",
    ),
    PeerKey(
        trl="tf32", axolotl="tf32",
        note="products of float32 are in full precision; train.precision=bf16 is the fast one",
    ),
    PeerKey(
        verl="actor_rollout_ref.actor.strategy", automodel="distributed.strategy dist_env.backend",
        note="there is one trainer, without a choice of FSDP or Megatron: the sizes in the section parallel decide"
        " (fsdp, tensor, pipeline, context, expert, replicate), and the backend is nccl or gloo, as the device is",
    ),
    PeerKey(
        trl="load_in_4bit load_in_8bit", swift="quant_bits quant_method", axolotl="load_in_4bit load_in_8bit",
        also="student.quantize student.quantization bnb_4bit_quant_type bnb_4bit_compute_dtype use_bnb_nested_quant"
        " quantization_config qlora",
        note="QLoRA, an adapter on a quantized student, is not there yet: the student is in student.dtype, with"
        " student.adapter or without. Only a frozen teacher can be quantized, by teacher.quantize",
    ),
    PeerKey(
        verl="actor_rollout_ref.rollout.agent.num_workers",
        note="the run asks the engine for all completions at once, and calls the reward and the environment itself:"
        " leave it out",
    ),
    PeerKey(
        verl="reward_model.enable reward_model.model.path", also="reward_model.path reward_model",
        note="there are no reward models, only rollout.reward, a Python function (package.module:function), which may"
        " ask a server for a score",
    ),
    PeerKey(
        also="hydra.job.chdir hydra.job.name hydra.output_subdir hydra.mode hydra.verbose",
        note="the configuration is read without Hydra: leave it out",
    ),
)  # fmt: skip
